#!lua flags=allow-oom
-- parts: clock counters snapshot_rows
-- snapshot_room: drops a snapshot, and all that the server has evicted. If `bytes` is above 0, it then
-- makes room for a new snapshot of that size in its place. If `bytes` is 0, the key may be empty.
-- To stay within the budget it drops the least recently used. It accounts for the new snapshot before its
-- chunks come, so that many that come at once stay within the budget together. `coming_ms`: how long a
-- snapshot may be on its way.
-- Returns the places of the missing chunks, or nothing if another worker brings the snapshot.
snapshot_rows.read()
for _, row in ipairs(snapshot_rows.rows) do
  row.comes = not row.here and now - row.used < coming_ms
  if bytes > 0 and row.key == key and row.comes then return false end
end

local function drop(row)
  redis.call('HDEL', tag .. ':snaps', row.key)
  redis.call('UNLINK', tag .. ':snap:' .. row.key)
  snapshot_rows.unlink_chunks(row)
  snapshot_rows.total = snapshot_rows.total - row.size
end

local left, evicted = {}, 0
for _, row in ipairs(snapshot_rows.rows) do
  if row.key == key then drop(row)
  elseif row.here or row.comes then left[#left + 1] = row
  else
    drop(row)
    evicted = evicted + 1
  end
end
-- Its manifest may exist although its account is gone.
redis.call('UNLINK', tag .. ':snap:' .. key)
for i, row in ipairs(bytes > 0 and left or {}) do
  if snapshot_rows.total + bytes <= budget and #left - i + 1 < max_snapshots then break end
  drop(row)
  evicted = evicted + 1
end
redis.call('HSET', tag .. ':stats', 'snapshot_bytes', snapshot_rows.total + bytes)
counters.add('snapshots_evicted', evicted)
counters.write()
if bytes == 0 then return {} end
redis.call('HSET', tag .. ':snaps', key, cmsgpack.pack({now, bytes, chunks}))
local missing = {}
for i, chunk in ipairs(chunks) do
  -- Keep the chunk until the others have come.
  if redis.call('PEXPIRE', tag .. ':chunk:' .. chunk, coming_ms, 'GT') == 0
    and redis.call('EXISTS', tag .. ':chunk:' .. chunk) == 0 then
    missing[#missing + 1] = i
  end
end
return missing
