-- parts: clock
-- arguments: used
-- Adds what a worker's runs have cost to the account of the day (UTC). `used` has rows of environment, tenant,
-- campaign, what was counted, and its number. An account has up to MAX_FIELDS names; costs that have no room go to
-- the environment alone. Any process may have written these keys, and a heartbeat must not fail for that.
local MAX_FIELDS, MAX_DAYS = 5000, 100
local function write_account()
  local day, accounts = math.floor(now / 86400000), tag .. ':accounts'
  local key = tag .. ':account:' .. day
  if redis.pcall('HSETNX', key, 'since', now) == 1 then
    redis.pcall('ZADD', accounts, day, day)
    local old = redis.pcall('ZRANGE', accounts, 0, -1 - MAX_DAYS)
    for _, each in ipairs(old) do redis.call('UNLINK', tag .. ':account:' .. each) end
    redis.pcall('ZREMRANGEBYRANK', accounts, 0, -1 - MAX_DAYS)
  end
  for i, n in ipairs(used.n) do
    local where, what = used.environment[i], used.what[i]
    local name = where .. ':' .. used.tenant[i] .. ':' .. used.campaign[i] .. ':' .. what
    local size = redis.pcall('HLEN', key)
    if type(size) == 'number' and size >= MAX_FIELDS and redis.call('HEXISTS', key, name) == 0 then
      name = where .. ':::' .. what
    end
    redis.pcall('HINCRBY', key, name, n)
  end
end
