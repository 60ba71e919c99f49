#!lua
-- parts: clock
-- state_keep: stores records of states. One that is empty only touches what is there.
local tick = struct.pack('>I4', math.floor(now / 3600000))
for _, state in ipairs(records) do
  local bucket, record = tag .. ':states:' .. state.bucket, state.record
  if record == '' then
    local kept = redis.call('HGET', bucket, state.field)
    record = kept and string.sub(kept, 5)
  end
  if record then redis.call('HSET', bucket, state.field, tick .. record) end
end
