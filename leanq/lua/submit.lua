#!lua
-- submit(batch): takes requests in, or says why not. Idempotent by rid.
-- Without allow-oom: a full memory refuses the whole call and so becomes back-pressure.
-- ARGV: client, most that may wait per lane and tenant,
--       time-to-live of replies (ms) where remembered verdicts count, else 0, then per request
--       rid, lane, tenant, level, deadline in the queue (ms from now, 0: none), longest run (ms),
--       body, digest or ''
-- Returns per request: 1 queued or attached to one that runs, 2 already in flight (the client is attached to it),
--       3 the tenant's lane is full, 4 no worker ever offered this lane, or the reply itself.
local client, most = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local any_lane = call('HLEN', P .. ':lanes') > 0
local remember = tonumber(ARGV[3])
local known, room, added, prints = {}, {}, {}, {}
local out, bodies, batch, batch_key, batch_ring, batch_tenant = {}, {}, {}, nil, nil, nil
local count, remembered = 0, 0

local function append_batch()
  if batch_key and call('RPUSH', batch_key, unpack(batch)) == #batch then
    call('RPUSH', batch_ring, batch_tenant)
  end
  batch, batch_key = {}, nil
end

-- The reply that an identical request got in the environment as it is now.
local function remembered_reply(lane, digest)
  if prints[lane] == nil then prints[lane] = call('HGET', P .. ':prints', lane) end
  return prints[lane] and call('GET', P .. ':verdict:' .. prints[lane] .. ':' .. digest)
end

for i = 4, #ARGV, 8 do
  local rid, lane, tenant, level = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local wait = P .. ':wait:' .. lane .. ':' .. level .. ':' .. tenant
  local key = P .. ':req:' .. rid
  if known[lane] == nil then
    known[lane] = not any_lane or call('HEXISTS', P .. ':lanes', lane) == 1
  end
  if room[wait] == nil then room[wait] = most - call('LLEN', wait) end
  local digest, answer = ARGV[i + 7], nil
  if call('EXISTS', key, P .. ':reply:' .. rid) > 0 then
    answer = call('GET', P .. ':reply:' .. rid)
    if not answer then
      call('HSET', key, 'c', client)
      answer = 2
    end
  elseif not known[lane] then
    answer = 4
  else
    local reply = digest ~= '' and remember > 0 and remembered_reply(lane, digest)
    local leader, worker
    if digest ~= '' and not reply then leader, worker = attach(rid, lane, digest, now) end
    if reply then
      call('SET', P .. ':reply:' .. rid, reply, 'PX', remember)
      remembered = remembered + 1
      answer = reply
    elseif not leader and room[wait] <= 0 then
      answer = 3
    else
      local deadline = tonumber(ARGV[i + 4])
      call('HSET', key, 'st', 'queued', 'l', lane, 't', tenant, 'p', level, 'c', client, 'n', 0,
        'at', now, 'exp', deadline > 0 and now + deadline or 0, 'run', ARGV[i + 5])
      bodies[#bodies + 1] = P .. ':body:' .. rid
      bodies[#bodies + 1] = ARGV[i + 6]
      if digest ~= '' then call('HSET', key, 'd', digest) end
      if leader then
        call('HSET', key, 'st', 'attached', 'on', leader, 'w', worker, 'n', 1)
      else
        if batch_key ~= wait or #batch >= 1000 then append_batch() end
        batch_key, batch_ring, batch_tenant = wait, P .. ':ring:' .. lane .. ':' .. level, tenant
        batch[#batch + 1] = rid
        room[wait] = room[wait] - 1
        added[lane] = (added[lane] or 0) + 1
      end
      count = count + 1
      answer = 1
    end
  end
  out[#out + 1] = answer
end
append_batch()
for i = 1, #bodies, 1000 do
  call('MSET', unpack(bodies, i, math.min(i + 999, #bodies)))
end
if remembered > 0 then call('HINCRBY', P .. ':stats', 'remembered', remembered) end
if count > 0 then
  call('HINCRBY', P .. ':stats', 'submitted', count)
  for lane, n in pairs(added) do
    call('HINCRBY', P .. ':stats', 'waiting:' .. lane, n)
    ring_bell(lane, n)
  end
end
return out
