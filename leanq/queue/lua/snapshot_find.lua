#!lua flags=allow-oom
-- The manifest of a snapshot and the hashes of its chunks, all touched. Nothing where there is none,
-- and an empty list where the server has evicted a part of it.
-- ARGV: key, time-to-live (ms)
local key, ttl_ms = ARGV[1], ARGV[2]
local manifest = call('GET', P .. ':snap:' .. key)
if not manifest then return false end
local row = call('HGET', P .. ':snaps', key)
if not row then return {} end
local _, bytes, chunks = unpack(cmsgpack.unpack(row))
local answer = {manifest}
for _, chunk in ipairs(chunks) do
  if call('PEXPIRE', P .. ':chunk:' .. chunk, ttl_ms) == 0 then return {} end
  answer[#answer + 1] = chunk
end
call('PEXPIRE', P .. ':snap:' .. key, ttl_ms)
call('HSET', P .. ':snaps', key, cmsgpack.pack({now_ms(), bytes, chunks}))
return answer
