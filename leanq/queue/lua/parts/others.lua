-- parts: clock lasting left
-- What other releases have in this shard. Releases before version 3 have keys of their own (see keys.py),
-- and what claims could not read is in lists of its own (see left.lua).
local others = {}

-- Returns rows of version, environment, and how many requests wait.
function others.left(stats)
  local rows = {}
  for i = 1, #stats, 2 do
    local version, environment = string.match(stats[i], '^left:(%d+):(.*)$')
    local n = version and redis.call('LLEN', left.key(environment, version)) or 0
    if n > 0 then rows[#rows + 1] = {tonumber(version), environment, n} end
  end
  return rows
end

-- Returns how many workers of early releases are alive, and rows of an environment, how many of its requests
-- wait for them, and the beginning of one's record. It looks at the first 1,000 tenants of each priority.
function others.early()
  local rows, stats = {}, redis.call('HGETALL', lasting .. ':stats')
  for i = 1, #stats, 2 do
    local environment, waiting, record = string.match(stats[i], '^waiting:(.*)$'), 0, ''
    local function add(list)
      local n = redis.call('LLEN', list)
      if n == 0 then return end
      local request_id = redis.call('LINDEX', list, -1)
      waiting, record = waiting + n, redis.call('GETRANGE', lasting .. ':req:' .. request_id, 0, 1023)
    end
    for priority = 0, environment and 2 or -1 do
      local place = environment .. ':' .. priority
      for _, tenant in ipairs(redis.call('LRANGE', lasting .. ':ring:' .. place, 0, 999)) do
        add(lasting .. ':wait:' .. place .. ':' .. tenant)
      end
    end
    if environment then add(lasting .. ':quarantined:' .. environment) end
    if waiting > 0 then rows[#rows + 1] = {environment, waiting, record} end
  end
  return redis.call('ZCOUNT', lasting .. ':workers', now, '+inf'), rows
end
