#!lua flags=allow-oom
-- Removes what nobody used for long from a part of one bucket, and moves the cursor on, which all
-- workers share. After a round there is an hour's rest.
-- ARGV: hours that an unused record is kept, buckets, most records looked at
-- Returns how many were removed, and whether a round ended.
local now = now_ms()
local place = P .. ':collect'
local r = call('HMGET', place, 'bucket', 'cursor', 'ended')
local bucket, cursor = tonumber(r[1] or 0), r[2] or '0'
if bucket == 0 and cursor == '0' and r[3] and now - tonumber(r[3]) < 3600000 then return {0, 0} end

local oldest = math.floor(now / 3600000) - tonumber(ARGV[1])
local key = P .. ':states:' .. string.format('%03x', bucket)
local found = call('HSCAN', key, cursor, 'COUNT', ARGV[3])
local removed = 0
for i = 1, #found[2], 2 do
  if struct.unpack('>I4', found[2][i + 1]) < oldest then
    removed = removed + call('HDEL', key, found[2][i])
  end
end

cursor = found[1]
if cursor == '0' then bucket = (bucket + 1) % tonumber(ARGV[2]) end
call('HSET', place, 'bucket', bucket, 'cursor', cursor)
if bucket ~= 0 or cursor ~= '0' then return {removed, 0} end
call('HSET', place, 'ended', now)
return {removed, 1}
