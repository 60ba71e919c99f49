#!lua flags=allow-oom
-- parts: clock
-- register: a worker enters the fleet and says which environments it serves; `info` and `about` are for
-- people to read, `fingerprint` may be ''.
redis.call('ZADD', tag .. ':workers', now + lease_ms, worker)
redis.call('HSET', tag .. ':info', worker, info)
for _, environment in ipairs(environments) do
  redis.call('HSET', tag .. ':environments', environment.name, environment.about)
  if environment.fingerprint ~= '' then
    redis.call('HSET', tag .. ':fingerprints', environment.name, environment.fingerprint)
  end
end
-- Small hashes are searched from end to end. One value too long for that makes Redis index these, which
-- are asked for all requests of a call at once.
for _, name in ipairs({'phase', 'runs', 'stats'}) do
  redis.call('HSETNX', tag .. ':' .. name, '', string.rep('.', 65))
end
return 1
