#!lua flags=allow-oom
-- parts: clock counters
-- snapshot_room: drops a snapshot, and all that the server has evicted. If `bytes` is above 0, it then
-- makes room for a new snapshot of that size in its place. If `bytes` is 0, the key may be empty.
-- To stay within the budget it drops the least recently used. It accounts for the new snapshot before its
-- chunks come, so that many that come at once stay within the budget together. `coming_ms`: how long a
-- snapshot may be on its way.
-- Returns the places of the missing chunks, or nothing if another worker brings the snapshot.
-- `users`: how many snapshots have each chunk, which goes with the last of them.
local rows, users, total = {}, {}, 0
local flat = redis.call('HGETALL', tag .. ':snaps')
for i = 1, #flat, 2 do
  local used, size, hashes = unpack(cmsgpack.unpack(flat[i + 1]))
  local here = redis.call('EXISTS', tag .. ':snap:' .. flat[i]) == 1
  local comes = not here and now - used < coming_ms
  if bytes > 0 and flat[i] == key and comes then return false end
  rows[#rows + 1] = {key = flat[i], used = used, size = size, chunks = hashes, stays = here or comes}
  total = total + size
  for _, chunk in ipairs(hashes) do users[chunk] = (users[chunk] or 0) + 1 end
end
table.sort(rows, function(a, b) return a.used < b.used end)

local function drop(row)
  redis.call('HDEL', tag .. ':snaps', row.key)
  redis.call('UNLINK', tag .. ':snap:' .. row.key)
  for _, chunk in ipairs(row.chunks) do users[chunk] = users[chunk] - 1 end
  for _, chunk in ipairs(row.chunks) do
    if users[chunk] == 0 then redis.call('UNLINK', tag .. ':chunk:' .. chunk) end
  end
  total = total - row.size
end

local left, evicted = {}, 0
for _, row in ipairs(rows) do
  if row.key == key then drop(row)
  elseif row.stays then left[#left + 1] = row
  else
    drop(row)
    evicted = evicted + 1
  end
end
-- Its manifest may exist although its account is gone.
redis.call('UNLINK', tag .. ':snap:' .. key)
for i, row in ipairs(bytes > 0 and left or {}) do
  if total + bytes <= budget and #left - i + 1 < max_snapshots then break end
  drop(row)
  evicted = evicted + 1
end
redis.call('HSET', tag .. ':stats', 'snapshot_bytes', total + bytes)
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
