-- Nothing may fail after the first write: this user can have lost a right.
local may = redis.acl_check_cmd
local denied = not may('PEXPIREAT') and 'pexpireat' or not may('HLEN') and 'hlen'
  or not may('HGETALL') and 'hgetall'
if denied then
  error({ err = "NOPERM this user has no permissions to run the '" .. denied .. "' command" })
end
