-- What is due: rollouts whose lease ran out, rollouts that have waited a while, ended tasks of which nobody told.
-- KEYS leases, waiting, untold ; ARGV waited_ms, most leases, most waiting, most untold
local now = now_ms()
return {
  redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2]),
  redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1], 'LIMIT', 0, ARGV[3]),
  redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[4]),
}
