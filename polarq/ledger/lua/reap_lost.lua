-- Takes one rollout back from an owner that let its lease run out, or that is known to be dead. All is looked at again
-- here: a renewal, a commit or another reaper that came first wins.
-- KEYS task, rollout, leases, events, tasks
-- ARGV rollout_id, task_id, events_max, stem, keep_s, max_attempts, summary of a failure, summary of a cancel,
--   the incarnation that is known to be dead ('' for none), most losses, rollouts lost with it, share of the loss that
--   is held against it, how its worker ended ('' for not known)
local task, rollout, leases, events, tasks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, task_id, max = ARGV[1], ARGV[2], ARGV[3]
local r = redis.call('HMGET', rollout, 'state', 'token', 'owner', 'lease_ms', 'attempt', 'cancel', 'why', 'incarnation')
local state, owner = r[1], r[3] or ''
if not state or redis.call('EXISTS', task) == 0 then
  forget(leases, id)
  return {'orphan', '', ''}
end
local now = now_ms()
if ENDS[state] then
  be_over(leases, task, id)
  return {'index', owner, ''}
end
if state == 'queued' then
  if redis.call('ZSCORE', beside(leases, 'waiting'), id) then redis.call('ZREM', leases, id)
  else wait_in_line(leases, task, id, now) end
  return {'index', owner, ''}
end
local lease, incarnation = tonumber(r[4] or 0), r[8] or ''
local dead = incarnation ~= '' and incarnation == ARGV[9]
if lease > now and not dead then
  redis.call('ZADD', leases, lease, id)
  return {'held', owner, ''}
end

local cause = cause_of(leases, owner, incarnation, dead)
shut(leases, rollout)
local how = ARGV[13]
local lost, held_against, kept = note_loss(rollout, owner, state, r[5], cause, now, tonumber(ARGV[11]),
  tonumber(ARGV[12]), how)
-- A new token, so that nothing the old owner still holds can commit.
redis.call('HINCRBY', rollout, 'token', 1)
redis.call('HDEL', rollout, 'lease_ms')

local HOW = {
  node_gone = 'the node was gone', worker_gone = 'its worker was gone', lease_expired = 'its lease was not renewed',
}

local function story()
  local lines = {}
  for i, loss in ipairs(kept) do
    local s = math.floor(loss.at_ms / 1000) % 86400
    local with = loss.beside > 0 and ', with ' .. loss.beside .. (loss.beside == 1 and ' other' or ' others') or ''
    local known = loss.how ~= '' and ': ' .. loss.how or ''
    lines[i] = string.format('attempt %d on %s while %s, at %02d:%02d:%02d UTC (%s%s%s)', loss.attempt, loss.node,
      loss.stage, math.floor(s / 3600), math.floor(s / 60) % 60, s % 60, HOW[loss.cause], known, with)
  end
  return table.concat(lines, '; ')
end

local same_crash = held_against > tonumber(ARGV[6]) - 0.000001
local action = 'queued'
if r[6] == '1' then
  action = 'cancelled'
elseif same_crash or lost >= tonumber(ARGV[10]) then
  action = 'failed'
end
emit(events, max, 'session.reaped', {task_id = task_id, session_id = id, node_id = owner, attempt = tonumber(r[5]),
  stage = state, cause = cause, lost = lost, status = action, how = how, beside = tonumber(ARGV[11]),
  share = tonumber(ARGV[12])})
touch(task, tasks, task_id, now)
if action == 'queued' then
  redis.call('HSET', rollout, 'state', 'queued', 'queued_ms', now, 'released_by', owner)
  redis.call('HDEL', rollout, 'owner', 'job_id', 'incarnation')
  wait_in_line(leases, task, id, now)
  redis.call('HINCRBY', task, 'queued', 1)
  emit(events, max, 'session.state_changed', {task_id = task_id, session_id = id, status = 'queued',
    released_by = owner, reason = cause})
  return {action, owner, cause}
end
local said
if action == 'failed' then
  local summary = cjson.decode(ARGV[7])
  local same = string.format('the same crash each time (the worker %s while %s%s)',
    cause == 'lease_expired' and 'hung' or 'died', state, how ~= '' and ': ' .. how or '')
  summary.outcome.message = string.format('lost with its worker %d times, %s: %s', lost,
    same_crash and same or 'which is the most that are tried', story())
  said = cjson.encode(summary)
else
  said = stopped_summary(task, r[7], ARGV[8])
end
end_held(events, max, task, rollout, task_id, id, owner, action, said, cause, now)
finish(task, events, max, ARGV[4], task_id, ARGV[5], now)
return {action, owner, cause}
