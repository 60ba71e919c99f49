#!lua flags=allow-oom
-- parts: clock
-- snapshot_find: returns the manifest of a snapshot and the hashes of its chunks, and touches them all.
-- Returns nothing if there is no such snapshot, and an empty list if the server has evicted a part of it.
local manifest = redis.call('GET', tag .. ':snap:' .. key)
if not manifest then return false end
local row = redis.call('HGET', tag .. ':snaps', key)
if not row then return {} end
local _, bytes, chunks = unpack(cmsgpack.unpack(row))
local found = {manifest}
for _, chunk in ipairs(chunks) do
  if redis.call('PEXPIRE', tag .. ':chunk:' .. chunk, ttl_ms) == 0 then return {} end
  found[#found + 1] = chunk
end
redis.call('PEXPIRE', tag .. ':snap:' .. key, ttl_ms)
redis.call('HSET', tag .. ':snaps', key, cmsgpack.pack({now, bytes, chunks}))
return found
