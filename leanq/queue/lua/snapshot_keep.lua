#!lua
-- Makes a snapshot visible whose chunks have come.
-- ARGV: key, manifest, time-to-live (ms), chunk hashes...
-- Returns 1, or 0 where it lost its place or a chunk meanwhile.
local key, manifest, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local row = call('HGET', P .. ':snaps', key)
if not row then return 0 end
local chunks = cmsgpack.unpack(row)[3]
if #chunks ~= #ARGV - 3 then return 0 end
for i, chunk in ipairs(chunks) do
  if chunk ~= ARGV[i + 3] then return 0 end
  if call('PEXPIRE', P .. ':chunk:' .. chunk, ttl_ms) == 0 then return 0 end
end
call('SET', P .. ':snap:' .. key, manifest, 'PX', ttl_ms)
return 1
