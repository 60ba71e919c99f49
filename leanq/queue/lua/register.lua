#!lua flags=allow-oom
-- register: a worker enters the fleet and says which environments it serves.
-- ARGV: worker, lease (ms), what it says of itself, (environment, what it says of the environment,
--   the fingerprint of its environment or '')*
call('ZADD', P .. ':workers', now_ms() + ARGV[2], ARGV[1])
call('HSET', P .. ':info', ARGV[1], ARGV[3])
for i = 4, #ARGV, 3 do
  call('HSET', P .. ':environments', ARGV[i], ARGV[i + 1])
  if ARGV[i + 2] ~= '' then call('HSET', P .. ':prints', ARGV[i], ARGV[i + 2]) end
end
-- Small hashes are searched from end to end. One value too long for that makes Redis index these,
-- which all requests of a call ask at once.
for _, key in ipairs({WHERE, RUNS}) do call('HSETNX', key, '', string.rep('.', 65)) end
return 1
