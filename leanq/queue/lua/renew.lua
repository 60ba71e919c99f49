#!lua flags=allow-oom
-- renew: a sign of life, which extends the worker's lease over all its work.
-- ARGV: worker, lease (ms), most attempts, time-to-live of replies (ms),
--   lease of a worker that holds nothing (ms), its environments
-- Returns {size of the processing list, 1 where some worker's lease has lapsed,
--   request ids taken away because they ran longer than they may, 1 where the fleet knows this worker,
--   how many workers there are, how many requests wait in its environments}.
local worker, ttl = ARGV[1], ARGV[4]
local now = now_ms()
note_minute(now)
local work = P .. ':work:' .. worker
local told = {}
-- Whoever renews is not overdue, however late it comes.
call('ZADD', P .. ':workers', now + ARGV[2], worker)
local judged = now >= expiry_grace(now, tonumber(ARGV[2]))
local timed_out = judged and call('ZRANGEBYSCORE', work, '-inf', now, 'LIMIT', 0, 100) or {}
for i, request_id in ipairs(timed_out) do
  -- The rest is taken with the next renewal.
  if disbanded >= FOLLOWERS then timed_out = {unpack(timed_out, 1, i - 1)} break end
  call('ZREM', work, request_id)
  requeue(request_id, true, tonumber(ARGV[3]), now, ttl, told)
end
if #timed_out > 0 then call('HINCRBY', STATS, 'reaped', #timed_out) end
tell(told, ttl)
local lapsed = judged and call('ZRANGEBYSCORE', P .. ':workers', '-inf', now, 'LIMIT', 0, 1) or {}
local held = call('ZCARD', work)
call('ZADD', P .. ':workers', now + (held > 0 and ARGV[2] or ARGV[5]), worker)
local waiting = 0
for i = 6, #ARGV do
  waiting = waiting + tonumber(call('HGET', STATS, 'waiting:' .. ARGV[i]) or 0)
end
return {held, #lapsed, timed_out, call('HEXISTS', P .. ':info', worker),
  call('ZCARD', P .. ':workers'), waiting}
