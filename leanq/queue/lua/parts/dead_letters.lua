-- parts: clock
-- The newest requests that took down too many workers are kept for people to look at.
local MAX_DEAD_LETTERS = 10000

local function bury(request_id, attempts, worker)
  local record = redis.call('GET', tag .. ':req:' .. request_id)
  redis.call('HSET', tag .. ':deadreq:' .. request_id, 'record', record, 'n', attempts, 'w', worker)
  redis.call('ZADD', tag .. ':dead', now, request_id)
  local surplus = redis.call('ZCARD', tag .. ':dead') - MAX_DEAD_LETTERS
  if surplus > 0 then
    local oldest = redis.call('ZPOPMIN', tag .. ':dead', surplus)
    for i = 1, #oldest, 2 do redis.call('UNLINK', tag .. ':deadreq:' .. oldest[i]) end
  end
end
