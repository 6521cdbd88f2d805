// Package ipam is the plugin's address store: host-local in process, built on the allocator and the disk store of the
// containernetworking plugins, in the state directory, with a quarantine for freed addresses.
//
// A network's store is the directory <stateDir>/ipam/<network>. A used address is a file with the address as its
// name and "container id CRLF interface" as its content, which is the library's format. An address in quarantine is
// the same file renamed to "quarantine.<address>", with the time of its release as its modification time; the rename
// makes the release atomic and keeps the last owner readable. A used address may have both files: it was asked for by
// name. The hard link "owner.<hash>.<address>" tells whose a used address is without reading its file.
//
// Each step that takes or frees an address is one system call on the directory, so processes work beside each other, each
// for an owner of its own, with the library's own lock file locked shared. A process that finds it free locks it alone, and
// removes what killed ones have left. So does work on all owners, and an ADD that finds no address.
//
// The package knows nothing of links or maps, and it neither runs nor understands other ipam plugins.
package ipam
