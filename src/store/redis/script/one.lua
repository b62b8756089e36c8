-- One decision.
--
-- KEYS[1]  the key
-- ARGV     what is asked
-- Answer   as in `window.lua`; instead of a number alone it and the server's time, in eight bytes each

local redis, KEYS, args = redis, KEYS, ARGV
local pack, step = struct.pack, nil
--[[ needs.lua ]]
local time = redis.call('TIME')
local micros = time[1] * 1000000 + time[2]

--[[ plain.lua ]]
--[[ window.lua ]]
