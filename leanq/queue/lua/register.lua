#!lua flags=allow-oom
-- parts: clock
-- register: a worker enters the fleet and says which environments it serves. `info` and `about` are for
-- people to read; `fingerprint` may be ''.
-- A user who lacks a right would end a later script in its middle, with requests in no list. So these are
-- all keys and commands of a worker's scripts:
local NAMES = [[req: body: upload: phase wait: ring: parked: inbox: wakeup: stats minutes accounts account: withdrawn joined: quarantined:
  isolating: environments fingerprints verdict: warm: shares: workers info stop: processing: dead disagreed deadreq: states:
  collect snaps snap: making: chunk: hot: texts:]]
-- Each stands behind the number of arguments that it takes here.
local COMMANDS = [[1 DEL EXISTS GET HGETALL HLEN LLEN LPOP MGET STRLEN UNLINK ZCARD ZPOPMIN
  2 COPY HDEL HEXISTS HGET HMGET HSCAN LINDEX LPUSH PEXPIRE RENAME RPUSH SADD ZREM ZSCORE
  3 GETRANGE HINCRBY HSET HSETNX LRANGE LREM SETRANGE ZADD ZCOUNT ZINCRBY ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK ZREVRANGE
  4 LMOVE XADD]]
local function missing_right()
  for name in string.gmatch(NAMES, '%S+') do
    local key = tag .. ':' .. name
    if not redis.acl_check_cmd('SET', key, '') then return 'SET ' .. key end
  end
  local arguments = {}
  for command in string.gmatch(COMMANDS, '%S+') do
    -- The key stands for each argument, as some commands take a second one.
    if tonumber(command) then arguments[#arguments + 1] = tag .. ':phase'
    elseif not redis.acl_check_cmd(command, unpack(arguments)) then return command end
  end
end
-- To ask is a courtesy: a server that stands in for Redis may lack this function or one of the commands.
local asked, missing = pcall(missing_right)
if asked and missing then return redis.error_reply('NOPERM a worker needs the right to ' .. missing) end

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
