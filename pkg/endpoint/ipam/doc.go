// Package ipam is the address store of the plugin: host-local in process, on the allocator and the disk store of the
// containernetworking plugins, in the state directory, with a quarantine for freed addresses.
//
// A network's store is the directory <stateDir>/ipam/<network>. A used address is a file with the address as its
// name and "container id CRLF interface" as its content, which is the library's format. A resting address is the
// same file renamed to "quarantine.<address>", its modification time the moment of its release; renaming keeps the
// release atomic and the last owner readable. Every change is made under the library's own lock file.
//
// The package knows nothing of links or maps, and it neither runs nor understands other ipam plugins.
package ipam
