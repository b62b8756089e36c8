-- Asks which commands can be called.
-- ARGV     commands
-- Answer   for each of them 1; 0: this user may not; -1: there is none

local answer = {}
for i, command in ipairs(ARGV) do
  local known, may = pcall(redis.acl_check_cmd, command)
  answer[i] = not known and -1 or may and 1 or 0
end
return answer
