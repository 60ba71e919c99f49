#!lua flags=allow-oom
-- parts: clock
-- state_collect: removes records that were not used for long from a part of one bucket, and moves the
-- cursor on. All workers share the cursor. After a round there is an hour's rest.
-- Answers removed: how many; ended: 1 if a round ended.
local progress = tag .. ':collect'
local r = redis.call('HMGET', progress, 'bucket', 'cursor', 'ended')
local bucket, cursor = tonumber(r[1] or 0), r[2] or '0'
if bucket == 0 and cursor == '0' and r[3] and now - tonumber(r[3]) < 3600000 then
  return answer({removed = 0, ended = 0})
end

local oldest = math.floor(now / 3600000) - unused_hours
local key = tag .. ':states:' .. string.format('%03x', bucket)
local found = redis.call('HSCAN', key, cursor, 'COUNT', max_records)
local removed = 0
for i = 1, #found[2], 2 do
  if struct.unpack('>I4', found[2][i + 1]) < oldest then
    removed = removed + redis.call('HDEL', key, found[2][i])
  end
end

cursor = found[1]
if cursor == '0' then bucket = (bucket + 1) % buckets end
redis.call('HSET', progress, 'bucket', bucket, 'cursor', cursor)
if bucket ~= 0 or cursor ~= '0' then return answer({removed = removed, ended = 0}) end
redis.call('HSET', progress, 'ended', now)
return answer({removed = removed, ended = 1})
