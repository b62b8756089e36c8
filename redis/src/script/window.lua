-- window.rs and what calls it, in Redis. Each part begins with its name, by which another part or
-- `many.lua` calls for it.

----- one
-- One decision: of the key KEYS[1], as ARGV says.
-- Answer   as in `window`; instead of a number alone it and the server's time, in eight bytes each

local redis, KEYS, args, pack, step = redis, KEYS, ARGV, struct.pack, nil
--[[ needs ]]
--[[ plain ]]
--[[ window ]]

----- needs
-- Nothing may fail after the first write, and this user can have lost a right. So all commands are asked for
-- before, a reset's too. What lacks is named, worded as a server's own errors.
local may = redis.acl_check_cmd
local function ask_for_all(ask)
  return ask('time') and ask('hincrby') and ask('hget') and ask('hmget') and ask('hset')
    and ask('hlen') and ask('hgetall') and ask('pexpireat') and ask('del')
end
local is_known, is_permitted = pcall(ask_for_all, may)
if not may then
  -- A server without that function may lack these options. This changes nothing.
  redis.call('PEXPIREAT', KEYS[1], 1, 'GT')
elseif not (is_known and is_permitted) then
  local forbidden = {}
  ask_for_all(function(command)
    is_known, is_permitted = pcall(may, command)
    if not is_known then
      error({ err = "ERR unknown command '" .. command .. "'" })
    elseif not is_permitted then
      forbidden[#forbidden + 1] = command
    end
    return true
  end)
  error({ err = "NOPERM no permissions to run the '" .. table.concat(forbidden, ', ') .. "' command" })
end
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]

----- plain
-- What the short way of `window` needs, if the charge may go there: the count of this window when it is
-- empty, when it has just been opened with these tokens, and when it is full or has no number for more;
-- and how many counts are of one window. None is 0, and all, and a full one to which tokens are added,
-- are below 2^53: from two windows after the epoch until some time in 2255.
local start, least, most, length
if #args < 11 then
  local now = args[6] and args[6] * 1000 or micros
  length = args[3] * 1000
  if now >= 2 * length and now + 2 * length < 9007199254740992 then
    start = now - (now - (args[5] or 0) * 1000) % length
    least, most = start + args[1], start + math.min(args[4], length - 1)
  end
end

----- window
-- One step over all quotas of one key. It stands in `one` and in `many.lua`, which give it
--
-- place    the place of the key in KEYS: a hash with a field for each quota, which has the start of its
--          window in microseconds, plus the tokens used in it. A count that this can't say is text:
--          `used@start`, the start in milliseconds, and `*n` if the count lives n windows. On a calendar
--          it is always text, `used@start-end#number`, with the number of the window
-- args     what is asked, below
-- micros   the server's time in microseconds
-- pack     joins an answer that is a number and the time; nil: it stays alone
-- step     nil: the decision is this key's alone. Otherwise one of a group's steps: a table, for a look,
--          gets of each quota when its tokens are due, or 0, and the end of the window that covers them;
--          0, after a refusal, writes what has moved. 1: nothing is done, and the answer is nil, if the
--          short way is not enough
-- start, least, most, length: of `plain`
--
-- Numbers are doubles. Every value is an integer of at most 2^53, and each expression is ordered so
-- that it stays exact, or on the same side of what it is compared with.

-- Most charges ask one plain quota: no rollover, nothing reserved, a grid. One command counts their tokens,
-- and says whether there was room, as long as they fit between two windows' starts.
-- args     tokens (at most the limit), field, length, limit; then, if it is not 0 or there is one more,
--          the grid; and what the time is under a foreign clock
-- Answer   the tokens used now; if refused, -(tokens used + 1). The server takes longer for an array or
--          text than for packed numbers
if start then
  local field, answer = args[2], nil
  local count = tonumber(redis.pcall('HINCRBY', KEYS[place], field, args[1]))
  if not count then
    -- Text, or it fails below as well.
  elseif count >= least and count <= most then
    answer = count - start
  elseif count < least then
    -- There was none, or it was of an earlier window.
    redis.call('HINCRBY', KEYS[place], field, least - count)
    local till, shift = (start + length + math.min(length, 60000000)) / 1000, 0
    if args[6] then
      shift = (micros - micros % 1000) / 1000 + 3600000 - args[6]
    end
    --[[ expiry ]]
    answer = least - start
  else
    redis.call('HINCRBY', KEYS[place], field, '-' .. args[1])
    -- Otherwise it is of a later window: the clock stepped back. Or more is left than there are numbers.
    if count - least < length and most - start == args[4] + 0 then
      answer = least - count - 1
    end
  end
  if answer then
    return pack and pack('>i8i8', answer, micros) or answer
  end
end
if step == 1 then
  return
end

-- Everything else.
-- args     what is done (charge, peek, take, return), with how many tokens, and
--          what the time is under a foreign clock; then for each quota: its field, length, limit,
--          capacity, what may be used at most, its grid (-1: begins with the first charge, -2: of a
--          calendar), and from when until when it takes returns; for a calendar the end is the number of
--          a window, and the length is how many boundaries follow, which begin with the number of the
--          first window and of the last one there is
-- Answer   the time, the tokens taken (-1: refused; -2: nothing was done, as the time is outside of these
--          boundaries), and for each quota the state that was stored: start, used, in how many windows it
--          ends, and for a calendar the end of the first, and its number (false: there was none)

local MAX = 9007199254740991
-- The last instant whose microseconds are below 2^53.
local LAST = 9007199254740
local ceil, floor, max, min, format = math.ceil, math.floor, math.max, math.min, string.format

if #args < 11 then
  -- A plain quota whose count is text, or under a clock that stepped back.
  local limit, grid = args[4], args[5] or 0
  args = { 'charge', args[1], args[6] or '', args[2], args[3], limit, limit, limit, grid, 0, 0 }
end
local act, tokens, real = args[1], tonumber(args[2]), (micros - micros % 1000) / 1000
if step then
  tokens = step == 0 and 0 or tokens
  act = step == 0 and act or 'peek'
end
-- Under a foreign clock nothing is to expire while a test runs faster or slower than real time.
local now, late = tonumber(args[3]), 3600000
if not now then
  now, late = real, 0
end

local fields, quotas = {}, {}
local i = 4
while i <= #args do
  local limit, capacity = tonumber(args[i + 2]), tonumber(args[i + 3])
  fields[#fields + 1] = args[i]
  local q = {
    stored = {},
    length = tonumber(args[i + 1]),
    limit = limit,
    capacity = capacity,
    -- A limit of 0 refuses everything, rolled-over tokens included.
    least = limit > 0 and limit - capacity or 0,
    most = tonumber(args[i + 4]),
    grid = tonumber(args[i + 5]),
    from = tonumber(args[i + 6]),
    returns = tonumber(args[i + 7]),
  }
  quotas[#quotas + 1] = q
  i = i + 8
  if q.grid == -2 then
    q.first, q.last, q.starts = tonumber(args[i]), tonumber(args[i + 1]), {}
    for j = 1, q.length do
      local start = tonumber(args[i + 1 + j])
      q.starts[j] = start
      -- The windows of the time and of the next one are needed.
      if start <= now and j + 2 <= q.length then
        q.at = j
      end
    end
    if not q.at or now >= q.starts[q.at + 1] then
      return { now, -2 }
    end
    i = i + 2 + q.length
    q.length = q.starts[q.at + 1] - q.starts[q.at]
  end
end

-- The start of the nth window after one that begins at `start`; n is at least 1.
local function after(n, start, length)
  return min((n - 1) * length + (start + length), MAX)
end

-- For how many windows a count lives: ceil((used - least) / limit), at least 1.
local function lives(q, used)
  local limit, capacity = q.limit, q.capacity
  local a, b = used % limit, capacity % limit
  local whole = (used - a) / limit + (capacity - b) / limit
  return max(whole + (a > limit - b and 1 or a + b > 0 and 0 or -1), 1)
end

-- How many windows are left to a state. One that saturates lasts for ever.
local function left(q)
  local saturates = not q.starts and after(q.windows, q.start, q.length) == MAX
  return saturates and MAX or q.windows
end

-- `used` less what n windows grant; in halves, because that may be above 2^53 where the difference is not.
local function less(q, used, n)
  local half = math.modf(n / 2)
  return used - q.limit * half - q.limit * half - q.limit * (n - half - half)
end

-- Window::counted
local function counted(q)
  local n = q.windows and left(q) or MAX
  -- What saturates lasts for ever, and under a limit of 0 nothing comes down.
  if n < MAX and q.limit > 0 and lives(q, q.used) > n then
    return less(q, q.least, -n)
  end
  return q.used
end

-- Window::after
local function begins(q, n)
  if not q.starts then
    return after(n, q.start, q.length)
  elseif n == 1 then
    return q.finish
  end
  -- Past the last one, or later than whatever it is compared with.
  return q.starts[q.number - q.first + 1 + n] or MAX
end

-- Window::in_debt, under a limit above 0
local function in_debt(q, added)
  if q.used + added <= q.limit then
    return 0
  end
  -- What stands above a limit that was lowered is no debt, but leaves no room for more.
  return max(floor((counted(q) + added - q.limit - 1) / q.limit) + 1, added > 0 and 1 or 0)
end

-- A number of a count: how long one lives can be above 2^53. What else a field may hold is that key's own
-- failure.
local function number_in(text)
  local number = tonumber(text)
  if number and number >= -MAX and number <= 2 * MAX then
    return number
  end
  error({ err = 'WRONGTYPE a field holds no count' })
end

-- Window::at. On a calendar, a state ends when so many windows have passed, or the last one that is
-- counted. The end that is stored binds, also where by these boundaries the window is shorter or longer.
local function load(q, value)
  local at, length = q.at, q.length
  q.start, q.used = q.grid < 0 and now or now - (now - q.grid) % length, q.least
  if at then
    q.start, q.finish, q.number = q.starts[at], q.starts[at + 1], q.first + at - 1
  end
  if not value then
    return
  end
  -- In which window `now` is by the windows of the state, and how many have passed.
  local used, start, n, finish, number, here, passed
  if at then
    used, start, finish, number, n = value:match('^(-?%d+)@(-?%d+)%-(%d+)#(-?%d+)%*?(%d*)$')
    used, start, finish = number_in(used), number_in(start), number_in(finish)
    number, n = number_in(number), n == '' and 1 or number_in(n)
    here, passed = q.start, q.number - number
  else
    used, start, n = value:match('^(-?%d+)@(-?%d+)%*?(%d*)$')
    if used then
      used, start = number_in(used), number_in(start)
      -- The last instant may cut one short.
      n = min(n == '' and 1 or number_in(n), ceil((MAX - start) / length))
    else
      local count = number_in(value:match('^-?%d+$'))
      start, n = (count - count % 1000) / 1000, 1
      start = start - (start - q.grid) % length
      used = count - start * 1000
    end
    finish = after(1, start, length)
    -- How far into its window `now` is, without `now - start`, which is not exact for an old start.
    here = now - (now % length - start % length) % length
    passed = (here - start) / length
    if passed < MAX / 2 then
      -- Whole, but for a start before the epoch and a time near the last instant.
      passed = floor(passed + 0.5)
    end
  end
  q.stored = { start, used, n, finish, number }
  if now < finish then
    if passed >= 0 or passed == -1 and now > here then
      q.start, q.finish, q.number = start, finish, number
    else
      -- The clock stepped back by a window or more: the count moves along.
      q.stepped_back = true
    end
    q.used, q.windows = max(used, q.least), n
    return
  end
  if passed == 0 then
    here, q.start, q.finish, q.number = finish, finish, q.starts[at + 2], number + 1
  end
  passed = max(passed, 1)
  used = less(q, used, passed)
  if passed < n and used > q.least then
    q.start, q.used, q.windows = here, used, n < MAX and n - passed or MAX
    q.used = counted(q)
  end
end

local values, expire = {}, 0
-- Window::state_with: tokens are added, or fewer than none
local function write(i, q, added)
  local used, n, value = min(max(q.used + added, q.least), MAX), 1, nil
  if q.limit > 0 then
    n = lives(q, min(max(counted(q) + added, q.least), MAX))
  elseif q.windows then
    n = left(q)
  end
  if q.starts then
    -- Past the last one it lasts for ever.
    n = n > q.last - q.number and MAX or n
    value = format('%.0f@%.0f-%.0f#%.0f', used, q.start, q.finish, q.number)
  elseif n == 1 and q.grid >= 0 and q.start + q.length <= LAST
      and used >= 0 and used < q.length * 1000 then
    value = q.start * 1000 + used
  else
    value = format('%.0f@%.0f', used, q.start)
  end
  values[#values + 1] = fields[i]
  values[#values + 1] = n > 1 and value .. format('*%.0f', n) or value
  -- Also where the key lives long enough already, in each new window: it may have lost its expiry.
  if q.start ~= q.stored[1] or n > q.stored[3] then
    -- No window of a calendar is twice as long as another, unless the zone data has changed. Not all
    -- of its boundaries are known.
    local till = max(begins(q, 1), min(begins(q, n), q.start + 2 * q.length * n))
    expire = max(expire, till + min(q.length, 60000))
  end
end

local stored = redis.call('HMGET', KEYS[place], unpack(fields))
for i, q in ipairs(quotas) do
  load(q, stored[i])
end

-- Whether the window of tokens has not ended, and none of a later one are taken
-- (Window::is_reserved_past).
local function takes_back(q)
  -- A step back moves the window of a count, whose start still says which tokens it is of. One that it
  -- has moved before may have ended since, and be of later tokens.
  local start = max(q.start, q.stored[1])
  if start < q.from then
    return false
  end
  local n = 0
  if q.most > q.limit then
    -- Under a limit of 0 nothing is covered: the end of the count says what it was taken of.
    n = q.limit > 0 and in_debt(q, 0) or left(q) - 1
  end
  if n > 0 and q.stepped_back then
    return false
  end
  if q.starts then
    return max(min(q.number + n, q.last), q.stored[5]) < q.returns
  end
  -- What has ended stays ended.
  return max(now, start) < q.returns
    and (n == 0 or begins(q, n) < q.returns or begins(q, n + 1) <= q.returns)
end

-- Of each quota, when its tokens are due, or 0, and the end of the window that covers them.
local function add_spans(spans)
  for _, q in ipairs(quotas) do
    local n = in_debt(q, tokens)
    spans[#spans + 1] = n > 0 and begins(q, n) or 0
    spans[#spans + 1] = begins(q, n + 1)
  end
  return spans
end

--[[ late ]]
local taken = 0
if act == 'return' then
  for i, q in ipairs(quotas) do
    if q.windows and takes_back(q) then
      write(i, q, -tokens)
    end
  end
elseif act == 'take' then
  for i, q in ipairs(quotas) do
    write(i, q, tokens)
  end
else
  local available = MAX
  for _, q in ipairs(quotas) do
    available = min(available, q.limit > 0 and q.most - q.used or 0)
  end
  available = max(available, 0)
  local peeks = act == 'peek'
  if tokens > available or tokens > 0 and #quotas > 1 and is_late(add_spans({})) then
    taken = -1
  elseif not peeks then
    taken = tokens
  end
  for i, q in ipairs(peeks and {} or quotas) do
    if taken > 0 then
      write(i, q, taken)
    elseif q.stepped_back then
      -- Otherwise it would move along for as long as the clock was ahead.
      write(i, q, 0)
    end
  end
end

if #values > 0 then
  redis.call('HSET', KEYS[place], unpack(values))
  if expire > 0 then
    local till, shift = expire, real + late - now
    --[[ expiry ]]
  end
end

local answer, moved = { now, taken }, false
for _, q in ipairs(quotas) do
  moved = moved or q.stepped_back
  for i = 1, q.starts and 5 or 3 do
    answer[#answer + 1] = q.stored[i] or false
  end
end
if step and step ~= 0 and tokens > 0 and taken == 0 then
  add_spans(step)
end
return answer, moved

----- late
-- `is_too_late` of decision/decide.rs: a quota covers its tokens only after another one's window has ended.
local function is_late(spans)
  local due, of, least = 0, 0, 9007199254740992
  for i = 1, #spans, 2 do
    if spans[i] > due then
      due, of = spans[i], i
    end
  end
  for i = 1, due > 0 and #spans or 0, 2 do
    least = i ~= of and math.min(least, spans[i + 1]) or least
  end
  return due >= least
end

----- expiry
-- The key lives until `till`, and no shorter than it did. One without an expiry is new, or has lost it: it
-- lives until the last of all its counts has ended, asked for or not. It stays for a window more, or for a
-- minute if that is shorter: MIGRATE hands over how long a key lives, and the clock there may be behind.
-- till     an instant on the clock of the counts, with that
-- shift    from it to the server's
if redis.call('PEXPIREAT', KEYS[place], till + shift, 'NX') == 0 then
  redis.call('PEXPIREAT', KEYS[place], till + shift, 'GT')
elseif redis.call('HLEN', KEYS[place]) > 1 then
  local all, last = redis.call('HGETALL', KEYS[place]), till
  for i = 2, #all, 2 do
    local length = string.match(all[i - 1], '^(%d+)[+sf]')
    local start, finish, n = string.match(all[i], '^%-?%d+@(%-?%d+)%-?(%d*)#?%-?%d*%*?(%d*)$')
    -- A number is later by a millisecond for each 1,000 tokens.
    start = start or math.floor((tonumber(all[i]) or 0) / 1000)
    finish = length and start + length or tonumber(finish) or 0
    -- No window of a calendar is twice as long as another.
    local ends = finish + (length or 2 * (finish - start)) * ((tonumber(n) or 1) - 1)
    last = math.max(last, math.min(ends + math.min(length or 60000, 60000), 9007199254740991))
  end
  if last > till then
    redis.call('PEXPIREAT', KEYS[place], last + shift)
  end
end
