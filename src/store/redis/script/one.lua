-- One decision.
--
-- KEYS[1]  the key
-- ARGV     what is asked
-- Answer   as in `window.lua`; instead of a number alone it and the server's time, in eight bytes each

local redis, key, args = redis, KEYS[1], ARGV
local call, try, pack, step = redis.call, redis.pcall, struct.pack, nil
--[[ needs.lua ]]
local time = call('TIME')
local micros = time[1] * 1000000 + time[2]

--[[ plain.lua ]]
--[[ window.lua ]]
