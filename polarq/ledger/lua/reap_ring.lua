-- Whether a waiting rollout's doorbell, which is in no queue, is rung again now; notes that it is. The more often it
-- was in vain, the longer the pause before the next.
-- KEYS task, rollout, waiting ; ARGV rollout_id, after_ms, longest_ms, just given back ('1')
local task, rollout, waiting, id = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local r = redis.call('HMGET', rollout, 'state', 'queued_ms', 'rung_ms', 'rings', 'lease_ms')
local state = r[1]
if not state or redis.call('EXISTS', task) == 0 then
  forget(waiting, id)
  return 'orphan'
end
if state ~= 'queued' then
  if redis.call('ZSCORE', waiting, id) then
    if ENDS[state] then be_over(waiting, task, id) else be_held(waiting, task, id, r[5] or now_ms()) end
  end
  return 'index'
end
local now, queued = now_ms(), tonumber(r[2])
local rings, last = 0, queued
if r[3] and tonumber(r[3]) >= queued then rings, last = tonumber(r[4]), tonumber(r[3]) end
if ARGV[4] == '1' then
  redis.call('HSET', rollout, 'rung_ms', now, 'rings', 0)
  return 'ring'
end
-- What a pause holds back needs no doorbell: nodes look for work when it ends.
if redis.call('SISMEMBER', beside(waiting, 'runs-paused'), redis.call('HGET', task, 'run_id')) == 1 then
  return 'early'
end
if now - last < math.min(tonumber(ARGV[3]), tonumber(ARGV[2]) * 2 ^ rings) then return 'early' end
redis.call('HSET', rollout, 'rung_ms', now, 'rings', rings + 1)
return 'ring'
