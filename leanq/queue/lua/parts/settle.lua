-- parts: clock bulk phase publish counters record single_flight deadline requeue warmth shares
-- arguments: worker settlements ends remember_ms
-- each call: settle.shares, settle.gone = nil, {}
-- Settles what a worker has finished. `ends` says what settlements have in common: outcome, reason (may be
-- ''), whether the worker is warm now, the way in which Lean came by its prefix, fingerprint, and whether
-- the replies were uploaded. `cpu_ms` is each settlement's own. `shares`: see shares.lua; opened for the
-- first lease that was charged. `gone`: keys of what is no longer needed, bodies and uploads.
local settle = {}

-- Whether a result counted before: its token is in the head of the reply.
function settle.has_counted(request_id, token)
  -- 0x93 opens an array of three, 0xa0 + n a text of n bytes.
  local head = '\147' .. string.char(160 + #token) .. token
  return redis.call('GETRANGE', tag .. ':req:' .. request_id, 0, #head - 1) == head
end

-- Ends the requests that joined a run with its reply; returns how many. Copies of one reply take up to
-- 16 MB; the other requests run again.
function settle.share(run_id, reply)
  local joined, shared = tag .. ':joined:' .. run_id, 0
  local request_ids = redis.call('ZRANGE', joined, 0, -1)
  if #request_ids > 0 then redis.call('UNLINK', joined) end
  for _, request_id in ipairs(request_ids) do
    local r = record.load(request_id)
    if not r or phase.read_joined(redis.call('HGET', tag .. ':phase', request_id)) ~= run_id then
      -- Its record was deleted, and its client has sent it again.
    elseif deadline.is_past(r) then
      deadline.expire(request_id, r, r.attempts + 1, false)
    elseif shared > 0 and (shared + 1) * publish.size(reply) > 16777216 then
      requeue.one(request_id, 'requeue')
    else
      publish.finish(request_id, r, reply)
      shared = shared + 1
    end
  end
  return shared
end

-- Adds to the fields of :phase that go those that name one of the runs that are settled.
function settle.close_runs(runs, fields)
  local keys = {}
  for i, run in ipairs(runs) do keys[i] = single_flight.key(run.lease.environment, run.lease.digest) end
  for i, run_id in ipairs(bulk.call('HMGET', tag .. ':phase', keys)) do
    if run_id == runs[i].request_id then fields[#fields + 1] = keys[i] end
  end
end

-- Ends what joined the runs that are settled.
function settle.end_joined(runs)
  local joined = {}
  for i, run in ipairs(runs) do joined[i] = tag .. ':joined:' .. run.request_id end
  -- Hardly ever has a request joined.
  if bulk.existing(joined) == 0 then return end
  for _, run in ipairs(runs) do
    local shared = settle.share(run.request_id, run.reply)
    counters.add('coalesced', shared)
    if shared > 0 then counters.ended(run.lease.environment, run.how.outcome, run.how.reason, shared) end
  end
end

-- Counts the CPU time (ms) of a result for its environment and its tenant.
function settle.account(lease, cpu_ms)
  if cpu_ms > 0 then
    counters.add('u_ms:' .. lease.environment, cpu_ms)
    counters.add('u:' .. lease.environment .. ':' .. lease.tenant, cpu_ms)
  end
  if lease.charge == '' then return end
  if settle.shares == nil then settle.shares = open_shares() or false end
  if settle.shares then settle.shares.correct(lease, cpu_ms) end
end

-- Settles one result, whose token is current. How long it took comes with a heartbeat.
function settle.one(item, how, lease, runs)
  if lease.detached ~= '' then settle.gone[#settle.gone + 1] = record.body_key(item.request_id) end
  settle.account(lease, item.cpu_ms)
  if how.way ~= '' then counters.add('way:' .. how.way, 1) end
  if how.warm and lease.affinity ~= '' then warmth.note(lease.environment, lease.affinity) end
  -- A run without a client was withdrawn before, by its own.
  if lease.client ~= '' then
    publish.reply(item.request_id, lease.client, item.reply)
    counters.ended(lease.environment, how.outcome, how.reason, 1)
  end
  if lease.digest == '' then return end
  if remember_ms > 0 and how.fingerprint ~= '' then
    publish.write(tag .. ':verdict:' .. how.fingerprint .. ':' .. lease.digest, item.reply, remember_ms)
  end
  runs[#runs + 1] = {request_id = item.request_id, reply = item.reply, lease = lease, how = how}
end

-- The leases of all settlements, as texts.
function settle.leases()
  local phases, request_ids = tag .. ':phase', {}
  if #settlements == 1 then return {redis.call('HGET', phases, settlements[1].request_id)} end
  for k, item in ipairs(settlements) do request_ids[k] = item.request_id end
  return bulk.call('HMGET', phases, request_ids)
end

-- The upload of a reply, which is named by the lease.
function settle.upload(item) return tag .. ':upload:' .. item.token .. ':' .. item.request_id end

-- Settles all results; per result 1, 0 where its token was not current, or 2 where the reply that was
-- uploaded is not there: nothing has changed, and it is to come with the call.
function settle.all()
  if #settlements == 0 then return {} end
  local accepted, done, runs, leases = {}, {}, {}, {}
  for k, text in ipairs(settle.leases()) do
    local item = settlements[k]
    local request_id = item.request_id
    -- Most leases of one call are the same text.
    local lease = leases[text]
    if lease == nil then lease = phase.read_lease(text) or false; leases[text] = lease end
    local how = ends[item.how]
    if how.uploaded then settle.gone[#settle.gone + 1] = settle.upload(item) end
    if lease and lease.token == item.token and not done[request_id] then
      if how.uploaded then item.reply = publish.uploaded(settle.upload(item)) end
      accepted[k] = item.reply and 1 or 2
      if item.reply then
        done[#done + 1], done[request_id] = request_id, true
        settle.one(item, how, lease, runs)
      end
    elseif settle.has_counted(request_id, item.token) then
      accepted[k] = 1
    else
      accepted[k] = 0
      counters.add('fenced', 1)
    end
  end
  if #done > 0 then
    bulk.call('ZREM', tag .. ':processing:' .. worker, done)
    counters.add('settled', #done)
    if #runs > 0 then settle.close_runs(runs, done) end
    bulk.call('HDEL', tag .. ':phase', done)
    if #runs > 0 then settle.end_joined(runs) end
  end
  bulk.call('UNLINK', nil, settle.gone)
  return accepted
end
