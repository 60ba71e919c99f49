-- parts: clock
-- Which headers the texts of a fingerprint had. :hot:FINGERPRINT has, for each tenant, the time (ms) and the
-- counts of its headers by their hashes, which halve each hour. :texts:FINGERPRINT has a header's text under
-- its hash.
-- A header's rank is the sum of its tenants' votes. A tenant's vote is its count of the header, divided by its
-- count of all headers and ONE_MORE. So a tenant has less than one vote in all, whatever it sends.
-- A name that comes to a full table takes its count from the least one there, and its place once that is
-- used up. So a flood of names fights for one place. Any process may have written these keys, and a heartbeat
-- must not fail for that.
local hot = {
  MAX_TENANTS = 64, MAX_HEADERS = 16, MAX_TEXTS = 64, LEFT_TEXTS = 48, HALF_LIFE_MS = 3600000,
  KEPT_MS = 86400000, ONE_MORE = 10, LEAST = 0.5,
}

-- Returns the counts in a tenant's row as of now, and their sum.
function hot.counts(text)
  local is_read, row = pcall(cmsgpack.unpack, type(text) == 'string' and text or '')
  local counts, total = {}, 0
  if not is_read or type(row) ~= 'table' or type(row[1]) ~= 'number' or type(row[2]) ~= 'table' then
    return counts, total
  end
  local left = 0.5 ^ (math.max(0, now - row[1]) / hot.HALF_LIFE_MS)
  for hash, n in pairs(row[2]) do
    local count = (tonumber(n) or 0) * left
    if count >= hot.LEAST then counts[hash], total = count, total + count end
  end
  return counts, total
end

-- Returns the name with the least number, and how many names there are.
function hot.least(numbers)
  local least, size = nil, 0
  for name, n in pairs(numbers) do
    size = size + 1
    if not least or n < numbers[least] or (n == numbers[least] and name < least) then least = name end
  end
  return least, size
end

-- Returns all tenants' counts, and the sums of each.
function hot.all(fingerprint)
  local tenants, totals = {}, {}
  local rows = redis.pcall('HGETALL', tag .. ':hot:' .. fingerprint)
  for i = 1, #rows, 2 do tenants[rows[i]], totals[rows[i]] = hot.counts(rows[i + 1]) end
  return tenants, totals
end

-- Returns the hashes of headers, that of the first rank first, and how many texts had each.
function hot.ranked(fingerprint)
  local tenants, totals = hot.all(fingerprint)
  local votes, texts, hashes = {}, {}, {}
  for tenant, counts in pairs(tenants) do
    for hash, n in pairs(counts) do
      if not votes[hash] then votes[hash], texts[hash], hashes[#hashes + 1] = 0, 0, hash end
      votes[hash] = votes[hash] + n / (totals[tenant] + hot.ONE_MORE)
      texts[hash] = texts[hash] + n
    end
  end
  table.sort(hashes, function(a, b)
    if votes[a] ~= votes[b] then return votes[a] > votes[b] end
    return a < b
  end)
  return hashes, texts
end

-- Writes a tenant's counts, or removes the tenant if there are none.
function hot.write(key, tenant, counts)
  if next(counts) then redis.pcall('HSET', key, tenant, cmsgpack.pack({now, counts}))
  else redis.pcall('HDEL', key, tenant) end
end

-- Returns whether there is a place for a new tenant, of whom n texts came.
function hot.has_place(key, fingerprint, n)
  local size = redis.pcall('HLEN', key)
  if type(size) ~= 'number' or size < hot.MAX_TENANTS then return true end
  local tenants, totals = hot.all(fingerprint)
  local least = hot.least(totals)
  local left = totals[least] - n
  for hash, count in pairs(tenants[least]) do
    tenants[least][hash] = left > 0 and math.floor(count * left / totals[least]) or nil
  end
  hot.write(key, least, tenants[least])
  return left <= 0
end

function hot.add(counts, hash, n)
  local least, size = hot.least(counts)
  if not counts[hash] and size >= hot.MAX_HEADERS then
    local left = counts[least] - n
    counts[least] = left > 0 and left or nil
    if left > 0 then return end
  end
  counts[hash] = (counts[hash] or 0) + n
end

-- Keeps a header's text; if there are too many, forgets those of the lowest ranks.
function hot.keep_text(fingerprint, hash, text)
  local key = tag .. ':texts:' .. fingerprint
  if redis.pcall('HSETNX', key, hash, text) == 1 and redis.pcall('HLEN', key) > hot.MAX_TEXTS then
    local keeps, hashes = {}, hot.ranked(fingerprint)
    for i = 1, math.min(#hashes, hot.LEFT_TEXTS) do keeps[hashes[i]] = true end
    local all = redis.pcall('HGETALL', key)
    for i = 1, #all, 2 do
      if not keeps[all[i]] then redis.pcall('HDEL', key, all[i]) end
    end
  end
  redis.pcall('PEXPIRE', key, hot.KEPT_MS)
end

-- Notes rows of fingerprint, tenant, header, and how many texts had it.
function hot.note(rows)
  for i, n in ipairs(rows.n) do
    local fingerprint, tenant, text = rows.fingerprint[i], rows.tenant[i], rows.header[i]
    local key, hash = tag .. ':hot:' .. fingerprint, redis.sha1hex(text)
    local row = redis.pcall('HGET', key, tenant)
    if type(row) == 'string' or hot.has_place(key, fingerprint, n) then
      local counts = hot.counts(row)
      hot.add(counts, hash, n)
      hot.write(key, tenant, counts)
      redis.pcall('PEXPIRE', key, hot.KEPT_MS)
      if counts[hash] then hot.keep_text(fingerprint, hash, text) end
    end
  end
end
