-- Decisions that travel together, one after the other, by one reading of the clock.
--
-- KEYS     a key for each decision; the same one may come again
-- ARGV     how many kinds of decisions there are; for each kind the number of its arguments and
--          these; then for each key which kind it is of, if there are several. Below 0, the key is of a
--          group together with the next one
-- Answer   the server's time, and for each key its answer, or its error
--
-- Several limits in one charge are a group: all of them are looked at, and if none refuses, all are charged.
-- What fails for one key fails while it is looked at. Where a group is refused, a number in its answers is
-- the tokens used, plus 1, below 0.

local call, try, pack, tonumber = redis.call, redis.pcall, nil, tonumber
--[[ needs.lua ]]
local time = call('TIME')
local micros = time[1] * 1000000 + time[2]

local function decide(key, args, start, least, most, length, step)
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

local answers, done, group = { micros }, 0, 0

local function kind_of(i)
  return kinds[math.abs(argv[at + i])]
end

-- Answers a key of a group, and says whether it refuses, and whether its count has moved.
local function look(i, spans)
  local key, kind = keys[i], kind_of(i)
  local args, start = kind[1], kind[2]
  if start then
    -- The short way: the count of this window, or there is none.
    local value = call('HMGET', key, args[2])[1]
    local count = value and tonumber(value) or not value and 0
    if count and count < start + kind[5] then
      local used = count < start and 0 or count - start
      answers[i + 1] = -used - 1
      return args[1] + 0 > args[4] - used
    end
  end
  local answer, moved = decide(key, args, nil, nil, nil, nil, spans)
  answers[i + 1] = answer
  return answer[2] < 0, moved, answer[2] == -2
end

-- Whether a quota of a group would count tokens in a window that has ended when another one covers them.
local function is_late(first, last, spans)
  local due, of, least = 0, 0, 9007199254740992
  for i = 1, #spans, 2 do
    if spans[i] > due then
      due, of = spans[i], i
    end
  end
  for i = 1, due > 0 and #spans or 0, 2 do
    least = i ~= of and math.min(least, spans[i + 1]) or least
  end
  for i = first, due > 0 and last or 0 do
    local kind = kind_of(i)
    if type(answers[i + 1]) == 'number' then
      -- On the clock of the counts the window of the short way ends then.
      least = math.min(least, (kind[2] + kind[5]) / 1000)
    end
  end
  return due >= least
end

local function decide_group(first, last)
  local refused, moved, spans, outside = false, {}, {}, false
  for i = first, last do
    local refuses, has_moved, is_outside = look(i, spans)
    refused, outside = refused or refuses, outside or is_outside
    moved[#moved + 1] = has_moved and i or nil
  end
  if outside then
    return
  elseif refused or is_late(first, last, spans) then
    for _, i in ipairs(moved) do
      decide(keys[i], kind_of(i)[1], nil, nil, nil, nil, 0)
    end
  elseif not may('HSET') then
    error({ err = "NOPERM this user has no permissions to run the 'hset' command" })
  elseif kind_of(first)[1][1] ~= 'peek' then
    for i = first, last do
      local kind = kind_of(i)
      answers[i + 1] = decide(keys[i], kind[1], kind[2], kind[3], kind[4], kind[5])
    end
  end
end

local function go_on()
  for i = done + 1, #keys do
    done = i
    local of = (argv[at + i] or 1) + 0
    if of < 0 then
      group = group + 1
    elseif group > 0 then
      decide_group(i - group, i)
      group = 0
    else
      local kind = kinds[of]
      answers[i + 1] = decide(keys[i], kind[1], kind[2], kind[3], kind[4], kind[5])
    end
  end
end
-- What fails for one key fails for that key only, or for its group.
repeat
  local well, why = pcall(go_on)
  if not well then
    for i = done - group, done do
      answers[i + 1] = { err = type(why) == 'table' and why.err or why }
    end
    group = 0
  end
until well
return answers
