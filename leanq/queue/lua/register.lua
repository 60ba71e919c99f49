#!lua flags=allow-oom
-- parts: clock
-- register: a worker enters the fleet and says which environments it serves. `info` and `about` are for
-- people to read; `fingerprint` may be ''. Returns 1, or the name of an environment that is an alias.
-- A user who lacks a right would end a later script in its middle, with requests in no list. So these are
-- all keys and commands of a worker's scripts:
local NAMES = [[req: body: upload: phase wait: ring: parked: inbox: wakeup: stats minutes accounts account: withdrawn joined: quarantined:
  isolating: environments fingerprints verdict: warm: shares: workers info stop: processing: dead disagreed deadreq: states:
  collect snaps snap: making: chunk:]]
local COMMANDS = [[COPY DEL EXISTS GET GETRANGE HDEL HEXISTS HGET HGETALL HINCRBY HLEN HMGET HSCAN HSET HSETNX LINDEX
  LLEN LMOVE LPOP LPUSH LREM MGET PEXPIRE RENAME RPUSH SADD SETRANGE STRLEN UNLINK XADD ZADD ZCARD ZCOUNT ZINCRBY
  ZPOPMIN ZRANGE ZRANGEBYSCORE ZREM ZREMRANGEBYRANK ZREVRANGE ZSCORE]]
local function missing_right()
  for name in string.gmatch(NAMES, '%S+') do
    local key = tag .. ':' .. name
    if not redis.acl_check_cmd('SET', key, '') then return 'SET ' .. key end
  end
  for command in string.gmatch(COMMANDS, '%S+') do
    -- Pass the key twice, as some commands take a second one.
    if not redis.acl_check_cmd(command, tag .. ':phase', tag .. ':phase') then return command end
  end
end
-- A server that stands in for Redis may lack this function.
local missing = redis.acl_check_cmd and missing_right()
if missing then return redis.error_reply('NOPERM a worker needs the right to ' .. missing) end
for _, environment in ipairs(environments.name) do
  if redis.call('HEXISTS', tag .. ':aliases', 'e:' .. environment) == 1 then return environment end
end

redis.call('ZADD', tag .. ':workers', now + lease_ms, worker)
redis.call('HSET', tag .. ':info', worker, info)
for i, environment in ipairs(environments.name) do
  local fingerprint = environments.fingerprint[i]
  redis.call('HSET', tag .. ':environments', environment, environments.about[i])
  if fingerprint ~= '' then redis.call('HSET', tag .. ':fingerprints', environment, fingerprint) end
end
-- Redis searches small hashes from end to end. One value that is too long for that makes it index these
-- two, of which each call asks many fields.
for _, name in ipairs({'phase', 'stats'}) do
  redis.call('HSETNX', tag .. ':' .. name, '', string.rep('.', 65))
end
return 1
