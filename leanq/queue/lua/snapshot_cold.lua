#!lua flags=no-writes
-- parts: snapshot_rows
-- snapshot_cold: the snapshots, 16 at most, that would be dropped for one of that many bytes, least
-- recently used first, and could go to an object store instead.
-- Returns per snapshot a list of its key and its chunks' hashes.
snapshot_rows.read()
local cold, total = {}, snapshot_rows.total
for _, row in ipairs(snapshot_rows.rows) do
  if total + bytes <= budget or #cold == 16 then break end
  if row.here and not row.away then
    cold[#cold + 1] = {row.key, unpack(row.chunks)}
    total = total - row.size
  end
end
return cold
