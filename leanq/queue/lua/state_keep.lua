#!lua
-- parts: clock
-- state_keep: stores records of states. An empty record only touches the one that is there.
local tick = struct.pack('>I4', math.floor(now / 3600000))
for i, name in ipairs(records.bucket) do
  local bucket, field, record = tag .. ':states:' .. name, records.field[i], records.record[i]
  if record == '' then
    local kept = redis.call('HGET', bucket, field)
    record = kept and string.sub(kept, 5)
  end
  if record then redis.call('HSET', bucket, field, tick .. record) end
end
