#!lua flags=allow-oom
-- parts: clock
-- state_recall: returns the record of a state (an id of 32 bytes) and its ancestors' records. It stops at
-- the first that is unknown or not of this shard. It touches them all, and writes that only when the hour
-- has changed.
local tick = struct.pack('>I4', math.floor(now / 3600000))
local home = struct.unpack('>I4', id) % shards
local records = {}
while #records < max_records and struct.unpack('>I4', id) % shards == home do
  local first, second = string.byte(id, 1, 2)
  local bucket = tag .. ':states:' .. string.format('%02x%x', first, math.floor(second / 16))
  local field = string.sub(id, 2)
  local kept = redis.call('HGET', bucket, field)
  if not kept then break end
  local record = string.sub(kept, 5)
  if string.sub(kept, 1, 4) ~= tick then redis.call('HSET', bucket, field, tick .. record) end
  records[#records + 1] = record
  if string.sub(record, 1, 1) ~= 'S' or #record < 33 then break end
  id = string.sub(record, 2, 33)
end
return records
