#!lua
-- Stores records of states. One that is empty only touches what is there.
-- ARGV: bucket, field, record, bucket, field, record, ...
local tick = struct.pack('>I4', math.floor(now_ms() / 3600000))
for i = 1, #ARGV, 3 do
  local bucket, field, record = P .. ':states:' .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if record == '' then
    local kept = call('HGET', bucket, field)
    record = kept and string.sub(kept, 5)
  end
  if record then call('HSET', bucket, field, tick .. record) end
end
