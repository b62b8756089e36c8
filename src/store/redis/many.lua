-- Decisions that travel together, one after the other, by one reading of the clock.
--
-- KEYS     a key for each decision; the same one may come again
-- ARGV     how many kinds of decisions there are; for each kind the number of its arguments and
--          these; then for each key which kind it is of, if there are several
-- Answer   the server's time, and for each key its answer, or its error

local call = redis.call
local find, match, sub, format = string.find, string.match, string.sub, string.format
local time = call('TIME')
local real = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local stamp = ''

local function decide(key, args, tail)
--[[ window.lua ]]
end

local keys, argv = KEYS, ARGV
local kinds, tails, at = {}, {}, 1
for kind = 1, argv[1] do
  local args, before = {}, at + 1
  at = before + argv[before]
  for i = before + 1, at do
    -- Once here, rather than wherever it is used.
    args[i - before] = tonumber(argv[i]) or argv[i]
  end
  kinds[kind] = args
end

local answers, done = { time[1] .. ' ' .. time[2] }, 0
local function go_on()
  for i = done + 1, #keys do
    done = i
    local kind = (argv[at + i] or 1) + 0
    answers[i + 1], tails[kind] = decide(keys[i], kinds[kind], tails[kind])
  end
end
-- What fails for one key fails for that key only.
repeat
  local well, why = pcall(go_on)
  if not well then
    answers[done + 1] = { err = type(why) == 'table' and why.err or why }
  end
until well
return answers
