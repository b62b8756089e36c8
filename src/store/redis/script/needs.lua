-- Nothing may fail after the first write: this user can have lost a right.
local may = redis.acl_check_cmd
if may then
  local denied = not may('PEXPIREAT') and 'pexpireat' or not may('HLEN') and 'hlen'
    or not may('HGETALL') and 'hgetall'
  if denied then
    error({ err = "NOPERM this user has no permissions to run the '" .. denied .. "' command" })
  end
else
  -- A server without that function may be one without these options. This changes nothing.
  redis.call('PEXPIREAT', KEYS[1], 1, 'GT')
end
