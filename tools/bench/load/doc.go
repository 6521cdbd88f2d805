// Package load generates the traffic of the benchmark and measures what arrives.
package load
