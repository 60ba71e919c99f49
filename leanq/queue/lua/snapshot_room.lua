#!lua flags=allow-oom
-- Drops a snapshot, and all that the server has evicted. For a new one in its place it then makes
-- room, dropping the least recently used, and enters it into the accounts before its chunks come, so
-- that many that come at once stay within the budget together.
-- ARGV: key (may be empty), bytes (0: only drop), budget (bytes), most snapshots,
--       how long one may be on its way (ms), chunk hashes...
-- Returns the places of the chunks that are missing, or nothing where another worker brings it.
local accounts = P .. ':snaps'
local key, bytes, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, coming_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()

local wanted = {}
for i = 6, #ARGV do wanted[#wanted + 1] = ARGV[i] end
-- Two snapshots may share a chunk, which goes with the last of them.
local users = {}
local function count(chunks, change)
  for _, chunk in ipairs(chunks) do users[chunk] = (users[chunk] or 0) + change end
end

local rows, total = {}, 0
local flat = call('HGETALL', accounts)
for i = 1, #flat, 2 do
  local used, size, chunks = unpack(cmsgpack.unpack(flat[i + 1]))
  local row = {key = flat[i], used = used, size = size, chunks = chunks}
  row.here = call('EXISTS', P .. ':snap:' .. row.key) == 1
  row.comes = not row.here and now - used < coming_ms
  if bytes > 0 and row.key == key and row.comes then return false end
  rows[#rows + 1] = row
  total = total + size
  count(chunks, 1)
end
table.sort(rows, function(a, b) return a.used < b.used end)

local function drop(row)
  call('HDEL', accounts, row.key)
  call('UNLINK', P .. ':snap:' .. row.key)
  count(row.chunks, -1)
  for _, chunk in ipairs(row.chunks) do
    if users[chunk] == 0 then call('UNLINK', P .. ':chunk:' .. chunk) end
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
call('UNLINK', P .. ':snap:' .. key)
for i, row in ipairs(bytes > 0 and left or {}) do
  if total + bytes <= budget and #left - i + 1 < most then break end
  drop(row)
  evicted = evicted + 1
end
call('HSET', TALLY, 'snapshot_bytes', total + bytes)
if evicted > 0 then call('HINCRBY', TALLY, 'snapshots_evicted', evicted) end
if bytes == 0 then return {} end
call('HSET', accounts, key, cmsgpack.pack({now, bytes, wanted}))
local missing = {}
for i, chunk in ipairs(wanted) do
  -- Not to expire before the others have come.
  if call('PEXPIRE', P .. ':chunk:' .. chunk, coming_ms, 'GT') == 0
    and call('EXISTS', P .. ':chunk:' .. chunk) == 0 then
    missing[#missing + 1] = i
  end
end
return missing
