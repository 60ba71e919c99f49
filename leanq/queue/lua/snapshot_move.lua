#!lua flags=allow-oom
-- parts: snapshot_rows
-- snapshot_move: a snapshot whose chunks are in an object store by now leaves this server but for its
-- manifest, which alone counts against the budget.
-- Returns 1, or 0 where it is another one by now.
snapshot_rows.read()
for _, row in ipairs(snapshot_rows.rows) do
  if row.key == key and row.here and not row.away and #row.chunks == #chunks then
    for i, chunk in ipairs(chunks) do
      if row.chunks[i] ~= chunk then return 0 end
    end
    snapshot_rows.unlink_chunks(row)
    local bytes = redis.call('STRLEN', tag .. ':snap:' .. key)
    redis.call('HSET', tag .. ':snaps', key, cmsgpack.pack({row.used, bytes, chunks, true}))
    redis.call('HINCRBY', tag .. ':stats', 'snapshot_bytes', bytes - row.size)
    redis.call('HINCRBY', tag .. ':stats', 'snapshots_moved', 1)
    return 1
  end
end
return 0
