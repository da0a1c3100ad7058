-- KEYS run, events ; ARGV run_id, version, keep_s, events_max
-- A claim of the run's rollouts keeps it as long again, so `keep_s` stands in it.
local run, events = KEYS[1], KEYS[2]
local before = redis.call('HGET', run, 'policy_version')
redis.call('HSET', run, 'policy_version', ARGV[2], 'keep_s', ARGV[3])
redis.call('EXPIRE', run, ARGV[3])
local known = beside(events, 'runs-known')
if redis.call('ZSCORE', known, ARGV[1]) ~= 'inf' then keep_until(known, ARGV[1], now_ms(), tonumber(ARGV[3])) end
if before ~= ARGV[2] then
  emit(events, ARGV[4], 'run.policy_version', {run_id = ARGV[1], policy_version = tonumber(ARGV[2]),
    before = tonumber(before)})
end
return 1
