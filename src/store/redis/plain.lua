-- The beginning of `one.lua` and of `many.lua`: the time, and what the short way of `window.lua` needs.

local call, try, type, format = redis.call, redis.pcall, type, string.format
local time = call('TIME')
local micros = time[1] * 1000000 + time[2]

-- For charges that may go that way: what the count is when this window is empty, when it has just
-- been opened with these tokens, and when it is full; and how many counts are of one window. All of
-- them, and a full one to which tokens are added, are below 2^53, until some time in 2255.
local function plain(args)
  if #args < 10 then
    local now, length = args[6] and args[6] * 1000 or micros, args[3] * 1000
    local start = now - (now - (args[5] or 0) * 1000) % length
    if start > 0 and now + 2 * length < 9007199254740992 then
      return start, start + args[1], start + args[4], length
    end
  end
end
