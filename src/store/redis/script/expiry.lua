-- The key lives until then, and no shorter than it did. One without an expiry is new, or has lost it. Then it
-- lives until the last of all its counts has ended, asked for or not.
-- till     an instant on the clock of the counts
-- shift    what is added to it on the server's
if redis.call('PEXPIREAT', KEYS[place], till + shift, 'NX') == 0 then
  redis.call('PEXPIREAT', KEYS[place], till + shift, 'GT')
elseif redis.call('HLEN', KEYS[place]) > 1 then
  local all, last = redis.call('HGETALL', KEYS[place]), till
  for i = 2, #all, 2 do
    local count, ends = tonumber(all[i]), nil
    local length, offset = string.match(all[i - 1], '^(%d+)[+sf](%d*)$')
    if count and length then
      -- Without an offset later by a millisecond for each 1,000 tokens.
      ends = (count - count % 1000) / 1000
      if offset ~= '' then
        ends = ends - (ends - offset) % length
      end
      ends = ends + length
    elseif length then
      local start, n = string.match(all[i], '^%-?%d+@(%-?%d+)%*?(%d*)$')
      ends = start and start + length * (tonumber(n) or 1)
    else
      -- No window of a calendar is twice as long as another.
      local start, finish, n = string.match(all[i], '^%-?%d+@(%-?%d+)%-(%d+)#%-?%d+%*?(%d*)$')
      ends = start and finish + 2 * (finish - start) * ((tonumber(n) or 1) - 1)
    end
    last = math.max(last, math.min(ends or 0, 9007199254740991))
  end
  if last > till then
    redis.call('PEXPIREAT', KEYS[place], last + shift)
  end
end
