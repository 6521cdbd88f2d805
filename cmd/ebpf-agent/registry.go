package main

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"strings"

	"github.com/ebpf-cni/ebpf-cni/cmd/internal/cli"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/agent"
)

// Where subnets come from.
const (
	registryKubernetes = "kubernetes"
	registryEtcd       = "etcd"
)

// The defaults that say something else where the registry says it.
const (
	defaultRoutingMode = "auto"
	defaultPort        = "4789"
	defaultVNI         = "4096"
	defaultSubnetFile  = "/run/flannel/subnet.env"
)

// registryFlags are about flannel's registry in etcd.
func (o *options) registryFlags() []cli.Flag {
	e := &o.etcd
	return []cli.Flag{
		{Name: "registry", Default: registryKubernetes, Help: "where subnets come from: kubernetes, the podCIDRs of Nodes; etcd, flannel's registry there, where this node leases one",
			Value: cli.OneOf(&o.registry, registryKubernetes, registryEtcd)},
		{Name: "etcd-endpoints", Help: "with --registry etcd, the members of etcd", Value: endpoints(&e.Endpoints)},
		{Name: "etcd-prefix", Default: agent.DefaultRegistryPrefix, Help: "with --registry etcd, what the network's keys begin with", Value: keyPrefix(&e.Prefix)},
		{Name: "etcd-cafile", Help: "certificates by which etcd's members are known; default: the machine's", Value: existingFile(&e.CAFile, "a file of certificates")},
		{Name: "etcd-certfile", Help: "certificate by which etcd knows this node", Value: existingFile(&e.CertFile, "a file with a certificate")},
		{Name: "etcd-keyfile", Help: "its key", Value: existingFile(&e.KeyFile, "a file with a key")},
		{Name: "etcd-username", Help: "name by which etcd knows this node", Value: userName(&e.Username)},
		{Name: "etcd-password-file", Help: "file with its password", Value: existingFile(&o.passwordFile, "a file with a password")},
		{Name: "public-ip", Help: "with --registry etcd, addresses by which other nodes reach this one, at most one of a family; default: that by which the default route leads out", Value: publicIPs(&e.Public)},
		{Name: "subnet-file", Default: defaultSubnetFile, Help: "with --registry etcd, where container engines are told of the subnet and of the MTU", Value: absoluteFile(&e.SubnetFile)},
	}
}

// completeRegistry checks what goes with the registry, and what does not.
func (o *options) completeRegistry() error {
	if o.registry != registryEtcd {
		return o.withoutRegistry()
	}
	c := &o.config
	given := []struct {
		flag string
		is   bool
		why  string
	}{
		{"nodes-file", c.NodesFile != "", "Nodes come from the registry"},
		{"kubeconfig", o.kubeconfig != "", "Nodes come from the registry"},
		{"api-server", len(c.APIServers) > 0, "Nodes come from the registry"},
		{"services", c.Services == agent.ServicesOn, "the registry knows no Services"},
		{"routing-mode", c.RoutingMode != defaultRoutingMode, "the registry says it, by Backend"},
		{"vxlan-port", fmt.Sprint(c.VXLANPort) != defaultPort, "the registry says it, by Backend"},
		{"vxlan-vni", fmt.Sprint(c.VXLANVNI) != defaultVNI, "the registry says it, by Backend"},
	}
	for _, g := range given {
		if g.is {
			return cli.Misuse("--%s: is given beside --registry=%s: %s; takes nothing then", g.flag, registryEtcd, g.why)
		}
	}
	if err := o.checkEtcd(); err != nil {
		return err
	}
	c.Services, c.Registry = agent.ServicesOff, &o.etcd
	return nil
}

// withoutRegistry refuses what is for the registry alone.
func (o *options) withoutRegistry() error {
	e := &o.etcd
	for _, g := range []struct {
		flag string
		is   bool
	}{
		{"etcd-endpoints", len(e.Endpoints) > 0}, {"etcd-prefix", e.Prefix != agent.DefaultRegistryPrefix}, {"etcd-cafile", e.CAFile != ""},
		{"etcd-certfile", e.CertFile != ""}, {"etcd-keyfile", e.KeyFile != ""}, {"etcd-username", e.Username != ""}, {"etcd-password-file", o.passwordFile != ""},
		{"public-ip", e.Public != [wire.Families]netip.Addr{}}, {"subnet-file", e.SubnetFile != defaultSubnetFile},
	} {
		if g.is {
			return cli.Misuse("--%s: is given without --registry=%s; takes something beside that alone", g.flag, registryEtcd)
		}
	}
	return nil
}

// checkEtcd checks how etcd is reached.
func (o *options) checkEtcd() error {
	e := &o.etcd
	secret := len(e.Endpoints) > 0 && strings.HasPrefix(e.Endpoints[0], "https:")
	switch {
	case len(e.Endpoints) == 0:
		return cli.Misuse("--etcd-endpoints: not given, with --registry=%s; takes %s", registryEtcd, takesEndpoints)
	case !secret && e.CAFile+e.CertFile+e.KeyFile != "":
		return cli.Misuse("--etcd-endpoints %q: are http, and certificates are given; takes https URLs then", strings.Join(e.Endpoints, ","))
	case (e.CertFile == "") != (e.KeyFile == ""):
		return cli.Misuse("--etcd-certfile, --etcd-keyfile: one is given without the other; takes both")
	case (e.Username == "") != (o.passwordFile == ""):
		return cli.Misuse("--etcd-username, --etcd-password-file: one is given without the other; takes both")
	case o.passwordFile == "":
		return nil
	}
	content, err := os.ReadFile(o.passwordFile)
	if err != nil {
		return cli.Misuse("--etcd-password-file %q: %v; takes a file with a password", o.passwordFile, errors.Unwrap(err))
	}
	if e.Password = strings.TrimRight(string(content), "\r\n"); e.Password == "" {
		return cli.Misuse("--etcd-password-file %q: is empty; takes a file with a password", o.passwordFile)
	}
	return nil
}

const (
	takesEndpoints = "URLs such as https://10.0.0.1:2379, comma-separated, all https or all http"
	etcdPort       = "2379"
)

// endpoints are URLs of etcd's members.
func endpoints(into *[]string) cli.Value {
	return cli.Value{Arg: "URL,...", Takes: takesEndpoints, Set: func(s string) error {
		for _, one := range list(s) {
			u, err := url.Parse(one)
			if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || strings.Trim(u.Path, "/") != "" {
				return fmt.Errorf("%q is no such URL", one)
			}
			if u.Port() == "" {
				u.Host += ":" + etcdPort
			}
			if at := u.Scheme + "://" + u.Host; len(*into) == 0 || strings.HasPrefix((*into)[0], u.Scheme+":") {
				*into = append(*into, at)
				continue
			}
			return cli.ErrTakes
		}
		if len(*into) == 0 {
			return cli.ErrTakes
		}
		return nil
	}}
}

// keyPrefix is what keys begin with; a slash at its end counts for nothing.
func keyPrefix(into *string) cli.Value {
	return cli.Value{Arg: "PATH", Takes: "the beginning of a key, such as " + agent.DefaultRegistryPrefix, Set: func(s string) error {
		*into = strings.TrimRight(s, "/")
		if !strings.HasPrefix(*into, "/") || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return cli.ErrTakes
		}
		return nil
	}}
}

func userName(into *string) cli.Value {
	return cli.Value{Arg: "NAME", Takes: "the name of a user of etcd's", Set: func(s string) error {
		if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return cli.ErrTakes
		}
		*into = s
		return nil
	}}
}

// publicIPs are at most one address of each family.
func publicIPs(into *[wire.Families]netip.Addr) cli.Value {
	return cli.Value{Arg: "ADDR,...", Takes: "an address of this node, or one of each family, comma-separated", Set: func(s string) error {
		for _, one := range list(s) {
			a, err := netip.ParseAddr(one)
			if err != nil || a.Is4In6() || a.Zone() != "" || !a.IsGlobalUnicast() {
				return fmt.Errorf("%q is no address by which a node is reached", one)
			}
			at := &into[wire.FamilyOf(a)]
			if at.IsValid() {
				return fmt.Errorf("%s and %s are of one family", *at, a)
			}
			*at = a
		}
		if *into == [wire.Families]netip.Addr{} {
			return cli.ErrTakes
		}
		return nil
	}}
}

// absoluteFile is the absolute path of a file, which need not exist.
func absoluteFile(into *string) cli.Value {
	v := cli.Directory(into)
	v.Arg, v.Takes = "FILE", "an absolute path of a file"
	return v
}
