#!lua flags=allow-oom
-- parts: clock counters
-- snapshot_room: drops a snapshot, and all that the server has evicted. For a new one of that many bytes
-- in its place (0: only drop; the key may be empty) it then makes room within the budget, dropping the
-- least recently used, and enters it into the accounts before its chunks come, so that many that come at
-- once stay within the budget together. `coming_ms`: how long one may be on its way.
-- Returns the places of the chunks that are missing, or nothing where another worker brings it.
local accounts = tag .. ':snaps'

-- Two snapshots may share a chunk, which goes with the last of them.
local users = {}
local function count(chunks, change)
  for _, chunk in ipairs(chunks) do users[chunk] = (users[chunk] or 0) + change end
end

local rows, total = {}, 0
local flat = redis.call('HGETALL', accounts)
for i = 1, #flat, 2 do
  local used, size, chunks = unpack(cmsgpack.unpack(flat[i + 1]))
  local row = {key = flat[i], used = used, size = size, chunks = chunks}
  row.here = redis.call('EXISTS', tag .. ':snap:' .. row.key) == 1
  row.comes = not row.here and now - used < coming_ms
  if bytes > 0 and row.key == key and row.comes then return false end
  rows[#rows + 1] = row
  total = total + size
  count(chunks, 1)
end
table.sort(rows, function(a, b) return a.used < b.used end)

local function drop(row)
  redis.call('HDEL', accounts, row.key)
  redis.call('UNLINK', tag .. ':snap:' .. row.key)
  count(row.chunks, -1)
  for _, chunk in ipairs(row.chunks) do
    if users[chunk] == 0 then redis.call('UNLINK', tag .. ':chunk:' .. chunk) end
  end
  total = total - row.size
end

local left, evicted = {}, 0
for _, row in ipairs(rows) do
  if row.key == key then drop(row)
  elseif row.here or row.comes then left[#left + 1] = row
  else
    drop(row)
    evicted = evicted + 1
  end
end
-- Its manifest may be there although its account is gone.
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
redis.call('HSET', accounts, key, cmsgpack.pack({now, bytes, chunks}))
local missing = {}
for i, chunk in ipairs(chunks) do
  -- Not to expire before the others have come.
  if redis.call('PEXPIRE', tag .. ':chunk:' .. chunk, coming_ms, 'GT') == 0
    and redis.call('EXISTS', tag .. ':chunk:' .. chunk) == 0 then
    missing[#missing + 1] = i
  end
end
return missing
