-- One decision.
--
-- KEYS[1]  the key
-- ARGV     what is asked
-- Answer   as below; the server's time ends one that is text

local call = redis.call
local find, match, sub, format = string.find, string.match, string.sub, string.format
local key, args, time = KEYS[1], ARGV, call('TIME')
local real = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local tail, stamp = nil, ' ' .. time[1] .. ' ' .. time[2]

--[[ window.lua ]]
