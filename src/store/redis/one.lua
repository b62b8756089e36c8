-- One decision.
--
-- KEYS[1]  the key
-- ARGV     what is asked
-- Answer   as in `window.lua`; a number as text, with the server's time behind it

local key, args = KEYS[1], ARGV
local stamp = ' ' .. time[1] .. ' ' .. time[2]
local start, least, most, length = plain(args)

--[[ window.lua ]]
