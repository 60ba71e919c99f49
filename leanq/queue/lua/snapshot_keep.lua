#!lua
-- snapshot_keep: makes a snapshot visible once its chunks have come.
-- Returns 1, or 0 if it lost its place or a chunk meanwhile.
local row = redis.call('HGET', tag .. ':snaps', key)
if not row then return 0 end
local _, _, expected = unpack(cmsgpack.unpack(row))
if #expected ~= #chunks then return 0 end
for i, chunk in ipairs(expected) do
  if chunk ~= chunks[i] then return 0 end
  if redis.call('PEXPIRE', tag .. ':chunk:' .. chunk, ttl_ms) == 0 then return 0 end
end
redis.call('SET', tag .. ':snap:' .. key, manifest, 'PX', ttl_ms)
return 1
