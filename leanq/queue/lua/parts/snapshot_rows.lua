-- each call: snapshot_rows.rows, snapshot_rows.users, snapshot_rows.total = {}, {}, 0
-- Snapshots as :snaps accounts for them. A row has the key, the time of its last use, the bytes that count
-- against the budget, and the hashes of its chunks. `users`: how many snapshots have each chunk, which goes
-- with the last of them.
local snapshot_rows = {}

function snapshot_rows.count(row, change)
  for _, chunk in ipairs(row.chunks) do
    snapshot_rows.users[chunk] = (snapshot_rows.users[chunk] or 0) + change
  end
end

-- Reads all rows, the least recently used first.
function snapshot_rows.read()
  local flat = redis.call('HGETALL', tag .. ':snaps')
  for i = 1, #flat, 2 do
    local used, size, chunks = unpack(cmsgpack.unpack(flat[i + 1]))
    local row = {key = flat[i], used = used, size = size, chunks = chunks}
    row.here = redis.call('EXISTS', tag .. ':snap:' .. row.key) == 1
    snapshot_rows.rows[#snapshot_rows.rows + 1] = row
    snapshot_rows.total = snapshot_rows.total + size
    snapshot_rows.count(row, 1)
  end
  table.sort(snapshot_rows.rows, function(a, b) return a.used < b.used end)
end

-- Removes the chunks of a row that no other row has.
function snapshot_rows.unlink_chunks(row)
  snapshot_rows.count(row, -1)
  for _, chunk in ipairs(row.chunks) do
    if snapshot_rows.users[chunk] == 0 then redis.call('UNLINK', tag .. ':chunk:' .. chunk) end
  end
end
