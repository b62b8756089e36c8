-- Decisions that travel together, one after the other, by one reading of the clock.
--
-- KEYS     a key for each decision; the same one may come again
-- ARGV     how many kinds of decisions there are; for each the number of its arguments and these; then for
--          each key its kind, if there are several. Below 0, the key is of a group together with the next
--          one. For each further charge that is equal to the key's, this is larger by the number of kinds
-- Answer   the server's time, and for each key its answer, or its error
--
-- Several limits in one charge are a group: all are looked at, and if none refuses, all are charged. What
-- fails for one key fails while it is looked at.
--
-- Equal charges of a key have one answer if all pass (to the last one), or if all are refused (to each);
-- otherwise a list of answers.

local redis, KEYS, pack, tonumber = redis, KEYS, nil, tonumber
--[[ needs ]]
--[[ late ]]
local function decide(place, args, start, least, most, length, step)
--[[ window ]]
end

local argv = ARGV
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
  --[[ plain ]]
  kinds[kind] = { args, start, least, most, length, tonumber(args[1]) }
end

local answers, done = { micros }, 0
-- Of a group's keys: their kinds, how many there are, and whether one command will charge each.
local group, size, running = {}, 0, {}

local function decide_group(before)
  local refused, spans, moved, outside = false, {}, {}, false
  for i = 1, size do
    local place, kind = before + i, group[i]
    local args, start, count = kind[1], kind[2], nil
    if start then
      -- The short way: there is a count of this window, or of none that has not ended.
      local value = redis.call('HGET', KEYS[place], args[2])
      count = value and string.match(value, '^%d+$') and tonumber(value) or not value and 0
    end
    if count and count < start + kind[5] then
      local used = count < start and 0 or count - start
      answers[before + i + 1] = -used - 1
      refused = refused or args[4] - used < kind[6]
      -- Nothing is due later, and all of the window that runs.
      spans[#spans + 1] = 0
      spans[#spans + 1] = (start + kind[5]) / 1000
      running[i] = count >= start and count + kind[6] <= kind[4]
    else
      running[i] = false
      local answer, has_moved = decide(place, args, nil, nil, nil, nil, spans)
      answers[before + i + 1] = answer
      refused, outside = refused or answer[2] == -1, outside or answer[2] == -2
      if has_moved then
        moved[#moved + 1] = i
      end
    end
  end
  if outside or group[1][1][1] == 'peek' then
    return
  elseif refused or is_late(spans) then
    for _, i in ipairs(moved) do
      decide(before + i, group[i][1], nil, nil, nil, nil, 0)
    end
    return
  end
  for i = 1, size do
    local place, kind = before + i, group[i]
    local count = running[i] and redis.pcall('HINCRBY', KEYS[place], kind[1][2], kind[1][1])
    answers[before + i + 1] = type(count) == 'number' and count - kind[2]
      or decide(place, kind[1], kind[2], kind[3], kind[4], kind[5])
  end
end

-- All at once if there is room, and otherwise one after the other.
local function decide_equal(place, kind, times)
  local args, start, cost = kind[1], kind[2], kind[6]
  if start then
    local all = { string.format('%.0f', cost * times), args[2], args[3], args[4], args[5], args[6] }
    local answer = decide(place, all, start, start + cost * times, kind[4], kind[5], 1)
    if answer and (answer >= 0 or args[4] + answer + 1 < cost) then
      return answer
    end
  end
  local each = {}
  for i = 1, times do
    each[i] = decide(place, args, start, kind[3], kind[4], kind[5])
  end
  return each
end

local function go_on()
  for i = done + 1, #KEYS do
    done = i
    local of = (argv[at + i] or 1) + 0
    if of < 0 then
      size = size + 1
      group[size] = kinds[-of]
    elseif size > 0 then
      size = size + 1
      group[size] = kinds[of]
      decide_group(i - size)
      size = 0
    elseif of > #kinds then
      local times = math.ceil(of / #kinds)
      answers[i + 1] = decide_equal(i, kinds[of - (times - 1) * #kinds], times)
    else
      local kind = kinds[of]
      answers[i + 1] = decide(i, kind[1], kind[2], kind[3], kind[4], kind[5])
    end
  end
end
-- What fails for one key fails for that key only, or for its group.
repeat
  local well, why = pcall(go_on)
  if not well then
    for i = done + 1 - math.max(size, 1), done do
      answers[i + 1] = { err = type(why) == 'table' and why.err or why }
    end
    size = 0
  end
until well
return answers
