package ipam

import (
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// ReadResolvConf reads the DNS settings that a pod shall get from a file in resolv.conf's format.
func ReadResolvConf(path string) (types.DNS, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return types.DNS{}, fmt.Errorf("read resolver configuration: %w", err)
	}
	return parseResolvConf(string(content)), nil
}

// parseResolvConf keeps what it understands, as the C library does; the last domain and search lines win.
func parseResolvConf(content string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(content) {
		fields := strings.Fields(line)
		if len(fields) < 2 || strings.ContainsAny(fields[0][:1], "#;") {
			continue
		}
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, fields[1])
		case "domain":
			dns.Domain = fields[1]
		case "search":
			dns.Search = fields[1:]
		case "options":
			dns.Options = append(dns.Options, fields[1:]...)
		}
	}
	return dns
}
