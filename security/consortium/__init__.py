"""The consortium's offline authority: the root key, the members' certificates and the signed manifests.

Scripts that set up a federation use it. It is meant for a machine without a network: it opens no connection, and it
never holds a private key of a member.

Imported by: nothing; it is run.

    authority   the folder of the authority: root, members, published manifests
    records     what it keeps of each member, and the checks of a request against it
    plan        `federation.toml`: its tables, and the template
    drafting    the manifest that follows from it
    show        manifests and the authority, as text and as JSON
    backup      `backup` and `restore` of that folder
    cli         the command `consortium`
    commands    its commands, imported when they are run
"""
