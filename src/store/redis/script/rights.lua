-- Asks for the commands that are needed, and fails with the names of those that can't be called. Redis 7.0
-- crashes when it is asked for EVALSHA. A server that can't be asked answers 0.

if not redis.acl_check_cmd then
  if KEYS[1] then
    -- Fails on servers before Redis 7. This changes nothing.
    redis.call('PEXPIREAT', KEYS[1], 1, 'GT')
  end
  return 0
end

local absent, forbidden = {}, {}
for _, command in ipairs({
  'time', 'hincrby', 'hget', 'hmget', 'hset', 'hlen', 'hgetall', 'pexpireat', 'del',
}) do
  local known, may = pcall(redis.acl_check_cmd, command)
  local list = not known and absent or not may and forbidden
  if list then
    list[#list + 1] = command
  end
end
-- Worded as a server's own errors.
if #absent > 0 then
  return { err = "ERR unknown command '" .. table.concat(absent, ', ') .. "'" }
elseif #forbidden > 0 then
  return { err = "NOPERM no permissions to run the '" .. table.concat(forbidden, ', ') .. "' command" }
end
return 1
