-- What the short way of `window.lua` needs, if the charge may go there: what the count is when this
-- window is empty, when it has just been opened with these tokens, and when it is full, or has no number
-- for more; and how many counts are of one window. None of them is 0, and all of them, and a full one to
-- which tokens are added, are below 2^53: from two windows after the epoch until some time in 2255.
local start, least, most, length
if #args < 10 then
  local now = args[6] and args[6] * 1000 or micros
  length = args[3] * 1000
  if now >= 2 * length and now + 2 * length < 9007199254740992 then
    start = now - (now - (args[5] or 0) * 1000) % length
    least, most = start + args[1], start + math.min(args[4], length - 1)
  end
end
