-- Identical requests, by their digests: one is leased, the leader, and others are attached to it,
-- its followers. :runs names the leader that takes more, by ENVIRONMENT:DIGEST, :with:LEADER has its
-- followers by age. A follower counts the attempt and shares its end; deadline and client are its own.
-- A leader whose client withdrew it runs on for them: it has its reply and no client ('').

local RUNS = P .. ':runs'
-- So many follow one leader, since they all end in one call. The next of their kind leads anew.
local FOLLOWERS = 1000
-- Copies of one reply for followers take up to so many bytes; the other followers run again.
local SHARED_BYTES = 16777216
-- How many followers this call has sent back.
local disbanded = 0
-- Leases of this call that are still to be written, by request id.
local pending = {}

local function run_of(environment, digest) return environment .. ':' .. digest end

local function place_of(request_id) return pending[request_id] or call('HGET', WHERE, request_id) end

local function is_follower(request_id, leader)
  return read_lease(place_of(leader)) and call('ZSCORE', P .. ':with:' .. leader, request_id)
end

-- The request id whose record says what a run is: one that was withdrawn has its reply, and no record, but
-- its followers asked for the same.
local function one_like(request_id, run)
  return run.client ~= '' and request_id or call('ZRANGE', P .. ':with:' .. request_id, 0, 0)[1] or request_id
end

-- Whether the request follows the leader from now on. quarantined request: it may take down its worker, and so
-- follows only what runs alone: what others run beside proves nothing against it.
local function attach(request_id, leader, digest, submitted, quarantined)
  local run = leader and read_lease(place_of(leader))
  -- What is no such run was left behind by a server that lost keys, or by an older release.
  if not run or run.digest ~= digest or quarantined and run.solo == '' then return false end
  local with = P .. ':with:' .. leader
  if call('ZCARD', with) >= FOLLOWERS then return false end
  call('ZADD', with, submitted, request_id)
  call('HSET', WHERE, request_id, attachment(leader, run.worker))
  return true
end

local function close_run(leader, environment, digest)
  local run = run_of(environment, digest)
  if call('HGET', RUNS, run) == leader then call('HDEL', RUNS, run) end
end

-- Takes a leased request away from its worker, which is told to stop it.
local function stop(request_id, run)
  call('HDEL', WHERE, request_id)
  call('ZREM', P .. ':work:' .. run.worker, request_id)
  call('RPUSH', P .. ':stop:' .. run.worker, request_id)
  if run.digest ~= '' then close_run(request_id, run.environment, run.digest) end
end

-- A follower ends for itself. The last one takes a run with it that nobody else waits for.
local function detach(request_id, leader)
  local with = P .. ':with:' .. leader
  call('ZREM', with, request_id)
  local run = read_lease(call('HGET', WHERE, leader))
  if run and run.client == '' and call('ZCARD', with) == 0 then stop(leader, run) end
end

-- Ends the followers of a leader with its reply; returns how many.
local function share(leader, reply, max_attempts, now, ttl_ms, told)
  local with, shared = P .. ':with:' .. leader, 0
  local request_ids = call('ZRANGE', with, 0, -1)
  if #request_ids > 0 then call('UNLINK', with) end
  for _, request_id in ipairs(request_ids) do
    local r = record(request_id)
    if not r or read_attachment(call('HGET', WHERE, request_id)) ~= leader then
      -- Somebody deleted it, and its client has sent it again.
    elseif is_late(r, now) then
      expire(request_id, r, r[ATTEMPTS] + 1, now, ttl_ms, told, true)
    elseif shared > 0 and (shared + 1) * #reply > SHARED_BYTES then
      put_back(request_id, false, max_attempts, now, ttl_ms, told)
    else
      finish(request_id, r[CLIENT], reply, ttl_ms, told)
      shared = shared + 1
    end
  end
  return shared
end

-- What became of a request whose lease ended without a reply, as put_back; its followers fare
-- likewise. Their order is all the same, since they are.
local function requeue(request_id, charge, max_attempts, now, ttl_ms, told, defer)
  local run = read_lease(call('HGET', WHERE, request_id))
  local how = put_back(request_id, charge, max_attempts, now, ttl_ms, told, defer)
  if run and run.digest ~= '' then
    close_run(request_id, run.environment, run.digest)
    local with = P .. ':with:' .. request_id
    for _, follower in ipairs(call('ZRANGE', with, 0, -1)) do
      if read_attachment(call('HGET', WHERE, follower)) == request_id then
        put_back(follower, charge, max_attempts, now, ttl_ms, told, defer)
      end
      disbanded = disbanded + 1
    end
    call('UNLINK', with)
  end
  return how
end
