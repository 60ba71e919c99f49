-- parts: clock lasting
-- arguments: used
-- Adds what a worker's runs have cost to the account of the day (UTC). `used` has rows of environment, tenant,
-- campaign, what was counted, and its number. An account has up to MAX_FIELDS names. Once it has
-- MAX_CAMPAIGN_FIELDS, costs go to new names without their campaign, so that no caller's campaigns hide another
-- tenant; costs that have no room go to the environment alone. Any process may have written these keys, and a
-- heartbeat must not fail for that.
local MAX_FIELDS, MAX_CAMPAIGN_FIELDS, MAX_DAYS = 5000, 4000, 100
local function write_account()
  local day, accounts = math.floor(now / 86400000), lasting .. ':accounts'
  local key = lasting .. ':account:' .. day
  if redis.pcall('HSETNX', key, 'since', now) == 1 then
    redis.pcall('ZADD', accounts, day, day)
    local old = redis.pcall('ZRANGE', accounts, 0, -1 - MAX_DAYS)
    for _, each in ipairs(old) do redis.call('UNLINK', lasting .. ':account:' .. each) end
    redis.pcall('ZREMRANGEBYRANK', accounts, 0, -1 - MAX_DAYS)
  end
  local function has_room(name, most)
    local size = redis.pcall('HLEN', key)
    return type(size) ~= 'number' or size < most or redis.call('HEXISTS', key, name) == 1
  end
  for i, n in ipairs(used.n) do
    local where, what, campaign = used.environment[i], ':' .. used.what[i], used.campaign[i]
    local tenant = where .. ':' .. used.tenant[i] .. ':'
    local name = tenant .. campaign .. what
    if campaign ~= '' and not has_room(name, MAX_CAMPAIGN_FIELDS) then name = tenant .. what end
    if not has_room(name, MAX_FIELDS) then name = where .. '::' .. what end
    redis.pcall('HINCRBY', key, name, n)
  end
end
