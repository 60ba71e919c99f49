-- parts: record wait_list phase left requeue
-- Takes back what releases left that could not read it, up to 100 requests of an environment. The last one
-- goes first, so that the front of each list keeps their order.
local function take_back(environment)
  local entries = redis.call('LPOP', left.key(environment, record.VERSION), 100) or {}
  for i = #entries, 1, -1 do
    local request_id, place = string.match(entries[i], '^(%S+) (%S+)$')
    local text = request_id and redis.call('GET', tag .. ':req:' .. request_id)
    local r, version = record.read(text), record.other_version(text)
    local name = r and wait_list.name_of(r, redis.call('HGET', tag .. ':phase', request_id))
    if r then redis.call('SET', tag .. ':req:' .. request_id, text) end
    if name and not string.find(place, ':', 1, true) then
      requeue.one(request_id, place, place)
    elseif name == 'quarantined:' .. environment then
      redis.call('LPUSH', tag .. ':' .. name, request_id)
    elseif name then
      wait_list.put('LPUSH', request_id, r)
    elseif version then
      left.put(environment, version, request_id, place)
    elseif request_id and not r then
      -- It was withdrawn.
      wait_list.forget(place, 1)
    end
  end
end
