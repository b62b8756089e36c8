-- Decisions that travel together, one after the other, by one reading of the clock.
--
-- KEYS     a key for each decision; the same one may come again
-- ARGV     how many kinds of decisions there are; for each kind the number of its arguments and
--          these; then for each key which kind it is of, if there are several
-- Answer   the server's time, and for each key its answer, or its error

local call, try, pack, tonumber = redis.call, redis.pcall, nil, tonumber
--[[ needs.lua ]]
local time = call('TIME')
local micros = time[1] * 1000000 + time[2]

local function decide(key, args, start, least, most, length)
--[[ window.lua ]]
end

local keys, argv = KEYS, ARGV
local kinds, at = {}, 1
for kind = 1, argv[1] do
  local before = at + 1
  at = before + argv[before]
  -- The first stays text: it is no number, or one that goes to a command, which wants it as text.
  local args = { argv[before + 1] }
  for i = before + 2, at do
    -- Once here, rather than wherever it is used.
    args[i - before] = tonumber(argv[i]) or argv[i]
  end
  --[[ plain.lua ]]
  kinds[kind] = { args, start, least, most, length }
end

local answers, done = { micros }, 0
local function go_on()
  for i = done + 1, #keys do
    done = i
    local kind = kinds[(argv[at + i] or 1) + 0]
    answers[i + 1] = decide(keys[i], kind[1], kind[2], kind[3], kind[4], kind[5])
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
